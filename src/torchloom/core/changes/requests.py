"""Requests of operators to steer a running job: checked, and refused with a reason or begun.

A request that is refused here never reaches a rank. A change that is begun continues in two_phase_commit.py. An order
is what a rank does at once, in the middle of a step: it is repeated until answered or expired, and carried out once.
"""

from __future__ import annotations

import difflib
import hashlib
from collections.abc import Iterable
from dataclasses import replace

from torchloom import knob_validation
from torchloom.core.changes.batch_rules import with_rules
from torchloom.core.changes.two_phase_commit import describe_success, query_steps
from torchloom.core.decision import NOTHING, Commands, Decision, Handlers, Refused, address
from torchloom.core.incidents.stack_evidence import of_ranks
from torchloom.core.state import pending_operations as pending
from torchloom.core.state.change_ledger import ChangePhase
from torchloom.core.state.cluster import ClusterState
from torchloom.core.state.pending_operations import ChangeRequest, Lives, PendingOperation
from torchloom.core.state.rank_states import Presence
from torchloom.protocol.operator import Done, No, Revert, SetKnobs, Steer
from torchloom.protocol.phrase import Prose, phrase
from torchloom.protocol.rank import Order
from torchloom.protocol.records import IncidentAmended, OrderEnded, OrderGiven, Record

AGAIN_SECONDS = 0.5
"""Between two repetitions of an order to a rank that has not answered."""
EXPIRE_SECONDS = 10.0
"""After this time no rank carries out an order."""


def steer(cluster: ClusterState, ask: Steer, reply: str = "", incident: str = "") -> Decision:
    """For an operator, or because of an incident."""
    if ask.verb in {"pause", "stop", "checkpoint"}:
        return request_change(cluster, ask, reply)
    return _give_order(cluster, ask, reply, incident)


def steer_unasked(cluster: ClusterState, ask: Steer, incident: str = "") -> Decision:
    """What the weaver itself requests. Nobody waits for an answer, and it may be repeated until it is under way."""
    try:
        return replace(steer(cluster, ask, incident=incident), answer=None)
    except Refused:
        return NOTHING


def request_id(*parts: object) -> str:
    """Of a request of the weaver itself: the same each time it is made for the same reason."""
    return hashlib.sha256(" ".join(map(str, parts)).encode()).hexdigest()[:32]


def _wait(request: str, reply: str) -> tuple[pending.WaiterAdded, ...]:
    """Of a request of the weaver itself nobody waits for the outcome."""
    return (pending.WaiterAdded(request, reply),) if reply else ()


# ── changes ──


def request_change(cluster: ClusterState, ask: SetKnobs | Revert | Steer, reply: str) -> Decision:
    """Set knobs, revert a change, or pause, stop or save: what all ranks do at one step."""
    earlier = _find_earlier(cluster, ask.request, reply)
    if earlier is not None:
        return earlier
    change_request = _to_change_request(cluster, ask)
    wanted = change_request.ask
    target = wanted.job, wanted.replica, wanted.rank
    lives = _find_target(cluster, *target)
    if isinstance(ask, SetKnobs):
        _check_values(cluster, ask)
    elif isinstance(ask, Steer):
        _check_group(cluster, ask, lives)
        if ask.verb == "checkpoint" and ask.job not in cluster.ledger.checkpointers:
            raise Refused(phrase("no_checkpointer", job=ask.job), phrase("register_checkpointer"))
    every = cluster.ledger.values_of(*target)
    values = with_rules(wanted, cluster.ledger.specs(wanted.job), every)
    if wanted.dry_run:
        shown = [
            phrase("value_to_set", name=name, before=str(every[name]), after=str(value))
            for name, value in values.items()
        ]
        return Decision(answer=Done(text=phrase("would_set", values=shown, count=len(lives))))
    busy = cluster.ledger.under_way(wanted.job)
    if busy is not None:
        why = phrase("change_under_way", id=busy.id, operator=busy.operator, job=wanted.job)
        raise Refused(why, phrase("try_again_soon"))
    inquiry = cluster.runtime.operations.inquiring(wanted.job)
    if inquiry is not None:
        operator = inquiry.change_request.ask.operator if inquiry.change_request else ""
        raise Refused(phrase("another_under_way", operator=operator, job=wanted.job), phrase("try_again_soon"))
    began = pending.OperationBegan(ask.request, wanted.job, lives, change_request, (reply,) if reply else ())
    return Decision((began,), query_steps(cluster, ask.request, lives))


def is_known(cluster: ClusterState, request: str) -> bool:
    """Whether a request was accepted: its ranks are being asked, or it is a change."""
    return request in cluster.runtime.operations.by_request or cluster.ledger.change_of(request) is not None


def _find_earlier(cluster: ClusterState, request: str, reply: str) -> Decision | None:
    """A repeated request waits with the first one, or gets its outcome."""
    if request in cluster.runtime.operations.by_request:
        return Decision(_wait(request, reply))
    change = cluster.ledger.change_of(request)
    if change is None:
        return None
    if change.phase is ChangePhase.ABORTED:
        raise Refused(phrase("change_aborted", id=change.id, why=change.outcome))
    if change.phase is ChangePhase.SETTLED and (change.failed or not change.applied):
        raise Refused(phrase("outcome_of", id=change.id, outcome=change.outcome))
    return Decision(answer=describe_success(cluster, change))


def _to_change_request(cluster: ClusterState, ask: SetKnobs | Revert | Steer) -> ChangeRequest:
    match ask:
        case SetKnobs():
            return ChangeRequest(ask)
        case Steer(verb="pause" | "stop" | "checkpoint" as action):
            return ChangeRequest(SetKnobs.from_fields(ask, values={}), action=action)
        case Revert():
            return _revert(cluster, ask)
    raise AssertionError(f"not a change: {ask!r}")


def _revert(cluster: ClusterState, ask: Revert) -> ChangeRequest:
    change = cluster.ledger.changes.get(ask.change)
    if change is None or change.job != ask.job:
        ids = [other.id for other in cluster.ledger.of_job(ask.job)]
        hint = did_you_mean(ask.change, ids, phrase("see_changes", job=ask.job))
        raise Refused(phrase("change_unknown", job=ask.job, change=ask.change), hint)
    if change.change.action != "set" or not change.takes_effect:
        raise Refused(phrase("change_set_nothing", id=ask.change, outcome=change.outcome or str(change.phase)))
    if change.reverted_by:
        raise Refused(phrase("reverted_already", change=ask.change, by=change.reverted_by))
    withdrawn = cluster.ledger.changes.get(change.change.withdraws)  # it takes effect again, as it was
    over = withdrawn.change.over if withdrawn else 0
    wanted = SetKnobs.from_fields(ask, replica=change.replica, rank=change.rank, values=change.before, over=over)
    return ChangeRequest(wanted, reverts=change.id)


def _check_values(cluster: ClusterState, ask: SetKnobs) -> None:
    offered = cluster.ledger.specs(ask.job)
    if not ask.values:
        raise Refused(phrase("nothing_to_set"), phrase("how_to_set", job=ask.job))
    for name in ask.values:
        if name not in offered:
            hint = did_you_mean(name, offered, phrase("see_knobs", job=ask.job, name=name))
            raise Refused(phrase("knob_unknown", job=ask.job, name=name), hint)
        if ask.rank is not None and offered[name].per != "rank":
            raise Refused(phrase("knob_of_job", name=name), phrase("how_to_set_knob", job=ask.job, name=name))
        if ask.over and not knob_validation.can_ramp(offered[name]):
            raise Refused(phrase("knob_not_a_number", name=name), phrase("leave_over_out"))
        if ask.over and offered[name].role == "batch_size":
            raise Refused(phrase("size_is_not_gradual", name=name), phrase("leave_over_out"))
    try:
        for name, value in ask.values.items():
            knob_validation.check(offered[name], value)
    except knob_validation.BadValue as error:
        raise Refused(error.message, phrase("see_bounds", job=ask.job)) from None


# ── targets ──


def _find_target(cluster: ClusterState, job: str, replica: str | None, rank: int | None) -> Lives:
    """The live ranks of a target, each with its incarnation. Refused if there are none, or one cannot be reached."""
    if job not in cluster.jobs:
        raise Refused(phrase("job_unknown", job=job), did_you_mean(job, cluster.jobs, phrase("see_jobs")))
    members = [cluster.ranks[id] for id in sorted(cluster.ranks.ids_of(job))]
    if replica is not None:
        replicas = {member.id.replica for member in members}
        if replica not in replicas:
            hint = did_you_mean(replica, replicas, phrase("see_replicas"))
            raise Refused(phrase("job_has_no_replica", job=job, replica=replica), hint)
        members = [member for member in members if member.id.replica == replica]
    if rank is not None:
        members = [member for member in members if member.id.rank == rank]
        if not members:
            raise Refused(phrase("replica_has_no_rank", job=job, replica=replica, rank=rank), phrase("see_ranks"))
    lost = next((member for member in members if member.presence is Presence.LOST), None)
    if lost is not None:
        raise Refused(phrase("target_lost", rank=lost.id, reason=lost.reason), phrase("wait_for_lost_rank"))
    live = [member for member in members if member.presence is Presence.LIVE]
    if not live:
        raise Refused(phrase("no_living_rank", job=job), phrase("see_ended_ranks", job=job))
    return tuple((member.id, member.incarnation) for member in live)


def _check_group(cluster: ClusterState, ask: Steer, lives: Lives) -> None:
    """One rank of a group that trains together cannot pause, resume, stop or save alone."""
    world = max(cluster.ranks[rank].world_size for rank, _ in lives)
    if ask.rank is not None and world > 1:
        hint = phrase("address_replica", job=ask.job, replica=ask.replica)
        raise Refused(phrase("rank_not_alone", rank=ask.rank, others=world - 1), hint)


def did_you_mean(name: str, names: Iterable[str], otherwise: Prose) -> Prose:
    near = difflib.get_close_matches(name, list(names), n=1)
    return phrase("did_you_mean", name=near[0]) if near else otherwise


# ── orders ──


def _give_order(cluster: ClusterState, ask: Steer, reply: str, incident: str) -> Decision:
    """Give an order to all ranks of a target."""
    if ask.request in cluster.runtime.operations.by_request:
        return Decision(_wait(ask.request, reply))
    before = cluster.ledger.order_of(ask.request)
    if before is not None and before.outcome and ask.verb != "stacks":  # stacks are not kept: they are taken again
        text = phrase("outcome_of", id=before.id, outcome=before.outcome)
        return Decision(answer=Done(text=text) if before.ok else No(why=text))
    lives = _find_target(cluster, ask.job, ask.replica, ask.rank)
    if ask.verb == "resume":
        _check_group(cluster, ask, lives)
    id = f"o{cluster.ledger.order_count + 1}"
    record = OrderGiven.from_fields(ask, id=id, lives=lives, incident=incident)
    return Decision((record, *_wait(ask.request, reply)), _send_order(cluster, id, ask.verb, lives))


def _send_order(cluster: ClusterState, id: str, verb: str, lives: Lives) -> Commands:
    order = Order(term=cluster.term, incarnation="", id=id, verb=verb, seconds=EXPIRE_SECONDS)  # type: ignore[arg-type]
    return address(lives, order)


def handle_ordered(cluster: ClusterState, operation: PendingOperation) -> Decision:
    """A rank answered; once all have, the order has ended. (`poll_order` notices ranks that are gone.)"""
    return NOTHING if len(operation.ordered) < len(operation.lives) else _end_order(cluster, operation, expired=False)


def _end_order(cluster: ClusterState, operation: PendingOperation, expired: bool) -> Decision:
    order = cluster.ledger.orders.get(operation.id)
    if order is None or order.outcome:
        return NOTHING
    silent = [rank for rank in operation.lives if rank not in operation.ordered]
    gone = [rank for rank in silent if not cluster.lives(rank, operation.lives[rank])]
    unanswered = [rank for rank in silent if rank not in gone]
    if unanswered and not expired:
        return NOTHING
    done = [rank for rank, answer in operation.ordered.items() if answer.outcome == "applied"]
    refused = [rank for rank, answer in operation.ordered.items() if answer.outcome != "applied"]
    parts = [phrase("order_applied", count=len(done))] if done else []
    if refused:
        message = operation.ordered[refused[0]].text[:200]
        parts.append(phrase("order_refused", ranks=sorted(refused), said=message))
    if unanswered:
        parts.append(phrase("order_expired", ranks=sorted(unanswered)))
    if gone:
        parts.append(phrase("order_killed" if order.verb == "kill" else "order_unknown", ranks=sorted(gone)))
    outcome = phrase("together", parts=parts)
    ok = bool(done or (gone and order.verb == "kill")) and not refused and not unanswered
    text = phrase("outcome_of", id=order.id, outcome=outcome)
    results = tuple((rank, answer.text) for rank, answer in sorted(operation.ordered.items()) if answer.text)
    answer: Done | No = Done(text=text, results=results) if ok else No(why=text)
    records: list[Record] = [OrderEnded(id=order.id, outcome=outcome, applied=len(done), ok=ok)]
    incident = cluster.incidents.get(order.incident)
    if incident is not None and incident.closed is None:
        stacks = {rank: answer.text for rank, answer in operation.ordered.items()}
        records.append(IncidentAmended(id=incident.id, evidence=(of_ranks(stacks, incident),), stacks=""))
    return Decision(tuple(records), replies=tuple((waiter, answer) for waiter in operation.waiters))


def poll_order(cluster: ClusterState, operation: PendingOperation, now: float) -> Decision:
    order = cluster.ledger.orders.get(operation.id)
    if order is None or order.outcome:
        return Decision((pending.OperationEnded(operation.request),))
    ended = _end_order(cluster, operation, expired=now - operation.began > EXPIRE_SECONDS)
    if ended or now - operation.sent < AGAIN_SECONDS:
        return ended
    silent = tuple((rank, life) for rank, life in operation.lives.items() if rank not in operation.ordered)
    commands = _send_order(cluster, operation.id, order.verb, silent)
    return Decision((pending.RanksAskedAgain(operation.request),), commands)


HANDLERS: Handlers = {
    **dict.fromkeys((SetKnobs, Revert), lambda cluster, ask, reply, _now: request_change(cluster, ask, reply)),
}
