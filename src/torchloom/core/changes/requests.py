"""What operators want of a running job: checked, refused with a reason, or begun.

What is found wrong here never reaches a rank. What is begun goes on in core/changes.py.
"""

from __future__ import annotations

from torchloom import knobs
from torchloom.core.changes.targets import did_you_mean, find_target, split_group
from torchloom.core.changes.two_phase_commit import ask_where, done
from torchloom.core.decision import Decision, Handlers
from torchloom.core.state.change_ledger import ChangePhase
from torchloom.core.state.cluster import ClusterState
from torchloom.core.state.pending_operations import ChangeRequest, Lives, OperationBegan, WaiterAdded
from torchloom.protocol.operator import Done, No, Revert, SetKnobs, Steer
from torchloom.protocol.phrase import Phrase, phrase


def set_knobs(cluster: ClusterState, ask: SetKnobs, reply: str) -> Decision:
    again = _asked_before(cluster, ask.request, reply)
    if again is not None:
        return again
    lives = find_target(cluster, ask.job, ask.replica, ask.rank)
    if isinstance(lives, No):
        return Decision(answer=lives)
    refusal = _check_values(cluster, ask)
    if refusal is not None:
        return Decision(answer=refusal)
    if ask.dry_run:
        return Decision(answer=Done(text=phrase("would_set", values=_told(cluster, ask), count=len(lives))))
    return _inquire(cluster, ChangeRequest(ask), lives, reply)


def revert(cluster: ClusterState, ask: Revert, reply: str) -> Decision:
    again = _asked_before(cluster, ask.request, reply)
    if again is not None:
        return again
    change = cluster.ledger.changes.get(ask.change)
    if change is None or change.job != ask.job:
        known = [c.id for c in cluster.ledger.of_job(ask.job)]
        hint = did_you_mean(ask.change, known, phrase("see_changes", job=ask.job))
        return Decision(answer=No(why=phrase("change_unknown", job=ask.job, change=ask.change), hint=hint))
    if change.change.action != "set" or not change.takes_effect:
        why = phrase("change_set_nothing", id=ask.change, outcome=change.outcome or str(change.phase))
        return Decision(answer=No(why=why))
    if change.reverted_by:
        return Decision(answer=No(why=phrase("reverted_already", change=ask.change, by=change.reverted_by)))
    withdrawn = cluster.ledger.changes.get(change.change.withdraws)  # comes back as it was
    wanted = SetKnobs(
        request=ask.request,
        job=ask.job,
        replica=change.replica,
        rank=change.rank,
        values=change.before,
        over=withdrawn.change.over if withdrawn else 0,
        patience=ask.patience,
        operator=ask.operator,
    )
    lives = find_target(cluster, ask.job, change.replica, change.rank)
    if isinstance(lives, No):
        return Decision(answer=lives)
    return _inquire(cluster, ChangeRequest(wanted, reverts=change.id), lives, reply)


def act(cluster: ClusterState, ask: Steer, reply: str) -> Decision:
    """Pause, stop or save: things done by all ranks at one step."""
    again = _asked_before(cluster, ask.request, reply)
    if again is not None:
        return again
    lives = find_target(cluster, ask.job, ask.replica, ask.rank)
    if isinstance(lives, No):
        return Decision(answer=lives)
    alone = split_group(cluster, lives, ask.replica, ask.rank)
    if alone is not None:
        return Decision(answer=alone)
    if ask.verb == "checkpoint" and ask.job not in cluster.ledger.checkpointers:
        return Decision(answer=No(why=phrase("no_checkpointer", job=ask.job), hint=phrase("register_checkpointer")))
    wanted = SetKnobs(
        request=ask.request,
        job=ask.job,
        replica=ask.replica,
        rank=ask.rank,
        values={},
        patience=ask.patience,
        operator=ask.operator,
    )
    assert ask.verb in {"pause", "stop", "checkpoint"}
    return _inquire(cluster, ChangeRequest(wanted, action=ask.verb), lives, reply)


def _asked_before(cluster: ClusterState, request: str, reply: str) -> Decision | None:
    """The same request once more: whoever asks waits with the others, or is told how it ended."""
    if request in cluster.runtime.operations.by_request:
        return Decision((WaiterAdded(request, reply),))
    change = cluster.ledger.change_of(request)
    if change is None:
        return None
    if change.phase is ChangePhase.ABORTED:
        return Decision(answer=No(why=phrase("change_aborted", id=change.id, why=change.outcome)))
    if change.phase is ChangePhase.SETTLED and (change.failed or not change.applied):
        return Decision(answer=No(why=phrase("outcome_of", id=change.id, outcome=change.outcome)))
    return Decision(answer=done(change))


def _check_values(cluster: ClusterState, ask: SetKnobs) -> No | None:
    offered = {name: knob.spec for name, knob in cluster.ledger.knobs.get(ask.job, {}).items()}
    if not ask.values:
        return No(why=phrase("nothing_to_set"), hint=phrase("how_to_set", job=ask.job))
    for name in ask.values:
        if name not in offered:
            hint = did_you_mean(name, offered, phrase("see_knobs", job=ask.job, name=name))
            return No(why=phrase("knob_unknown", job=ask.job, name=name), hint=hint)
        if ask.rank is not None and offered[name].per != "rank":
            return No(why=phrase("knob_of_job", name=name), hint=phrase("how_to_set_knob", job=ask.job, name=name))
        if ask.over and not knobs.can_ramp(offered[name]):
            return No(why=phrase("knob_not_a_number", name=name), hint=phrase("leave_over_out"))
    try:
        knobs.check_all(offered, ask.values)
    except knobs.BadValue as error:
        return No(why=error.message, hint=phrase("see_bounds", job=ask.job))
    return None


def _inquire(cluster: ClusterState, change_request: ChangeRequest, lives: Lives, reply: str) -> Decision:
    ask = change_request.ask
    busy = cluster.ledger.under_way(ask.job)
    asked = cluster.runtime.operations.inquiring(ask.job)
    if busy or asked:
        who = busy.operator if busy else asked.change_request.ask.operator if asked and asked.change_request else ""
        id = busy.id if busy else ""
        why = phrase("change_under_way" if busy else "another_under_way", id=id, operator=who, job=ask.job)
        return Decision(answer=No(why=why, hint=phrase("try_again_soon")))
    began = OperationBegan(ask.request, ask.job, lives, change_request, (reply,) if reply else ())
    return Decision((began,), ask_where(cluster, ask.request, lives))


def _told(cluster: ClusterState, ask: SetKnobs) -> list[Phrase]:
    before = {name: cluster.ledger.value_of(ask.job, ask.replica, ask.rank, name) for name in ask.values}
    return [
        phrase("value_to_set", name=name, before=str(before[name]), after=str(value))
        for name, value in ask.values.items()
    ]


HANDLERS: Handlers = {
    SetKnobs: lambda cluster, ask, reply, _now: set_knobs(cluster, ask, reply),
    Revert: lambda cluster, ask, reply, _now: revert(cluster, ask, reply),
}
