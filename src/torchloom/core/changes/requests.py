"""Requests of operators to change a running job: checked, and refused with a reason or begun.

A request that is refused here never reaches a rank. One that is begun continues in two_phase_commit.py.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from torchloom import knobs
from torchloom.core.changes.two_phase_commit import describe_success, query_steps
from torchloom.core.decision import Decision, Handlers, refuse
from torchloom.core.state.change_ledger import ChangePhase
from torchloom.core.state.cluster import ClusterState
from torchloom.core.state.pending_operations import ChangeRequest, Lives, OperationBegan, WaiterAdded
from torchloom.core.state.ranks import Presence
from torchloom.protocol.operator import Done, No, Revert, SetKnobs, Steer
from torchloom.protocol.phrase import Phrase, Prose, phrase


def request_change(cluster: ClusterState, ask: SetKnobs | Revert | Steer, reply: str) -> Decision:
    """Set knobs, revert a change, or pause, stop or save: what all ranks do at one step."""
    earlier = _find_earlier(cluster, ask.request, reply)
    if earlier is not None:
        return earlier
    change_request = _to_change_request(cluster, ask)
    if isinstance(change_request, No):
        return Decision(answer=change_request)
    wanted = change_request.ask
    lives = find_target(cluster, wanted.job, wanted.replica, wanted.rank)
    if isinstance(lives, No):
        return Decision(answer=lives)
    refusal = None
    if isinstance(ask, SetKnobs):
        refusal = _check_values(cluster, ask)
    elif isinstance(ask, Steer):
        refusal = _check_action(cluster, ask, lives)
    if refusal is not None:
        return Decision(answer=refusal)
    if wanted.dry_run:
        values = _describe_values(cluster, wanted)
        return Decision(answer=Done(text=phrase("would_set", values=values, count=len(lives))))
    return _begin(cluster, change_request, lives, reply)


def _find_earlier(cluster: ClusterState, request: str, reply: str) -> Decision | None:
    """A repeated request waits with the first one, or gets its outcome."""
    if request in cluster.runtime.operations.by_request:
        return Decision((WaiterAdded(request, reply),))
    change = cluster.ledger.change_of(request)
    if change is None:
        return None
    if change.phase is ChangePhase.ABORTED:
        return refuse(phrase("change_aborted", id=change.id, why=change.outcome))
    if change.phase is ChangePhase.SETTLED and (change.failed or not change.applied):
        return refuse(phrase("outcome_of", id=change.id, outcome=change.outcome))
    return Decision(answer=describe_success(change))


def _to_change_request(cluster: ClusterState, ask: SetKnobs | Revert | Steer) -> ChangeRequest | No:
    match ask:
        case SetKnobs():
            return ChangeRequest(ask)
        case Steer(verb="pause" | "stop" | "checkpoint" as action):
            return ChangeRequest(SetKnobs.from_fields(ask, values={}), action=action)
        case Revert():
            return _revert(cluster, ask)
    raise AssertionError(f"not a change: {ask!r}")


def _revert(cluster: ClusterState, ask: Revert) -> ChangeRequest | No:
    change = cluster.ledger.changes.get(ask.change)
    if change is None or change.job != ask.job:
        ids = [other.id for other in cluster.ledger.of_job(ask.job)]
        hint = did_you_mean(ask.change, ids, phrase("see_changes", job=ask.job))
        return No(why=phrase("change_unknown", job=ask.job, change=ask.change), hint=hint)
    if change.change.action != "set" or not change.takes_effect:
        return No(why=phrase("change_set_nothing", id=ask.change, outcome=change.outcome or str(change.phase)))
    if change.reverted_by:
        return No(why=phrase("reverted_already", change=ask.change, by=change.reverted_by))
    withdrawn = cluster.ledger.changes.get(change.change.withdraws)  # it takes effect again, as it was
    over = withdrawn.change.over if withdrawn else 0
    wanted = SetKnobs.from_fields(ask, replica=change.replica, rank=change.rank, values=change.before, over=over)
    return ChangeRequest(wanted, reverts=change.id)


def _check_action(cluster: ClusterState, ask: Steer, lives: Lives) -> No | None:
    alone = split_group(cluster, lives, ask.replica, ask.rank)
    if alone is not None:
        return alone
    if ask.verb == "checkpoint" and ask.job not in cluster.ledger.checkpointers:
        return No(why=phrase("no_checkpointer", job=ask.job), hint=phrase("register_checkpointer"))
    return None


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


def _begin(cluster: ClusterState, change_request: ChangeRequest, lives: Lives, reply: str) -> Decision:
    ask = change_request.ask
    busy = cluster.ledger.under_way(ask.job)
    asked = cluster.runtime.operations.inquiring(ask.job)
    if busy or asked:
        who = busy.operator if busy else asked.change_request.ask.operator if asked and asked.change_request else ""
        id = busy.id if busy else ""
        why = phrase("change_under_way" if busy else "another_under_way", id=id, operator=who, job=ask.job)
        return refuse(why, phrase("try_again_soon"))
    began = OperationBegan(ask.request, ask.job, lives, change_request, (reply,) if reply else ())
    return Decision((began,), query_steps(cluster, ask.request, lives))


def _describe_values(cluster: ClusterState, ask: SetKnobs) -> list[Phrase]:
    before = {name: cluster.ledger.value_of(ask.job, ask.replica, ask.rank, name) for name in ask.values}
    return [
        phrase("value_to_set", name=name, before=str(before[name]), after=str(value))
        for name, value in ask.values.items()
    ]


# ── targets ──


def find_target(cluster: ClusterState, job: str, replica: str | None, rank: int | None) -> Lives | No:
    """The live ranks of a target, each with its incarnation; or why there are none, or one cannot be reached."""
    if job not in cluster.jobs:
        hint = did_you_mean(job, cluster.jobs, phrase("see_jobs"))
        return No(why=phrase("job_unknown", job=job), hint=hint)
    members = [cluster.ranks[id] for id in sorted(cluster.ranks.ids_of(job))]
    if replica is not None:
        replicas = {member.id.replica for member in members}
        if replica not in replicas:
            hint = did_you_mean(replica, replicas, phrase("see_replicas"))
            return No(why=phrase("job_has_no_replica", job=job, replica=replica), hint=hint)
        members = [member for member in members if member.id.replica == replica]
    if rank is not None:
        members = [member for member in members if member.id.rank == rank]
        if not members:
            why = phrase("replica_has_no_rank", job=job, replica=replica, rank=rank)
            return No(why=why, hint=phrase("see_ranks"))
    missing = [member for member in members if member.presence is Presence.LOST]
    if missing:
        return No(
            why=phrase("target_lost", rank=missing[0].id, reason=missing[0].reason),
            hint=phrase("wait_for_lost_rank"),
        )
    live = [member for member in members if member.presence is Presence.LIVE]
    if not live:
        return No(why=phrase("no_living_rank", job=job), hint=phrase("see_ended_ranks"))
    return tuple((member.id, member.incarnation) for member in live)


def split_group(cluster: ClusterState, lives: Lives, replica: str | None, rank: int | None) -> No | None:
    """Why one rank of a group that trains together cannot pause, stop or save alone."""
    if rank is None:
        return None
    world = max(cluster.ranks[life[0]].world_size for life in lives)
    if world <= 1:
        return None
    return No(
        why=phrase("rank_not_alone", rank=rank, others=world - 1),
        hint=phrase("address_replica", job=lives[0][0].job, replica=replica),
    )


def did_you_mean(name: str, names: Iterable[str], otherwise: Prose) -> Prose:
    near = difflib.get_close_matches(name, list(names), n=1)
    return phrase("did_you_mean", name=near[0]) if near else otherwise


HANDLERS: Handlers = {
    SetKnobs: lambda cluster, ask, reply, _now: request_change(cluster, ask, reply),
    Revert: lambda cluster, ask, reply, _now: request_change(cluster, ask, reply),
}
