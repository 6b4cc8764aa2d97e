"""Orders: what a rank does at once, in the middle of a step. Repeated until answered or expired; carried out once."""

from __future__ import annotations

from torchloom.core.changes.requests import find_target, split_group
from torchloom.core.decision import NOTHING, Decision
from torchloom.core.incidents.stack_evidence import of_ranks
from torchloom.core.state.cluster import ClusterState
from torchloom.core.state.pending_operations import (
    Lives,
    OperationEnded,
    PendingOperation,
    RanksAskedAgain,
    WaiterAdded,
)
from torchloom.protocol.ids import RankId
from torchloom.protocol.operator import Done, No, Steer
from torchloom.protocol.phrase import phrase
from torchloom.protocol.rank import Command, Order
from torchloom.protocol.records import IncidentAmended, OrderEnded, OrderGiven, Record

AGAIN_SECONDS = 0.5
EXPIRE_SECONDS = 10.0


def give(cluster: ClusterState, ask: Steer, reply: str, incident: str = "") -> Decision:
    """Give an order to all ranks of a target, for an operator or because of an incident."""
    if ask.request in cluster.runtime.operations.by_request:
        return Decision((WaiterAdded(ask.request, reply),))
    before = cluster.ledger.order_of(ask.request)
    if before is not None and before.outcome and ask.verb != "stacks":  # stacks are not kept: they are taken again
        text = phrase("outcome_of", id=before.id, outcome=before.outcome)
        return Decision(answer=Done(text=text) if before.ok else No(why=text))
    lives = find_target(cluster, ask.job, ask.replica, ask.rank)
    if isinstance(lives, No):
        return Decision(answer=lives)
    if ask.verb == "resume":
        alone = split_group(cluster, lives, ask.replica, ask.rank)
        if alone is not None:
            return Decision(answer=alone)
    id = f"o{cluster.ledger.order_count + 1}"
    record = OrderGiven(
        id=id,
        request=ask.request,
        verb=ask.verb,
        job=ask.job,
        lives=lives,
        operator=ask.operator,
        incident=incident,
    )
    waits = (WaiterAdded(ask.request, reply),) if reply else ()
    return Decision((record, *waits), _commands(cluster, id, ask.verb, lives))


def _commands(cluster: ClusterState, id: str, verb: str, lives: Lives) -> tuple[tuple[RankId, Command], ...]:
    return tuple(
        (rank, Order(term=cluster.term, incarnation=life, id=id, verb=verb, seconds=EXPIRE_SECONDS))  # type: ignore[arg-type]
        for rank, life in lives
    )


def handle_ordered(cluster: ClusterState, operation: PendingOperation) -> Decision:
    """A rank answered; once all have, the order has ended. (`poll` notices ranks that are gone.)"""
    return NOTHING if len(operation.ordered) < len(operation.lives) else _end(cluster, operation, over=False)


def _end(cluster: ClusterState, operation: PendingOperation, over: bool) -> Decision:
    order = cluster.ledger.orders.get(operation.id)
    if order is None or order.outcome:
        return NOTHING
    silent = [rank for rank in operation.lives if rank not in operation.ordered]
    gone = [rank for rank in silent if not cluster.lives(rank, operation.lives[rank])]
    if len(gone) < len(silent) and not over:
        return NOTHING
    expired = [rank for rank in silent if rank not in gone]
    done = [rank for rank, answer in operation.ordered.items() if answer.outcome == "applied"]
    refused = [rank for rank, answer in operation.ordered.items() if answer.outcome != "applied"]
    parts = [phrase("order_applied", count=len(done))] if done else []
    if refused:
        message = operation.ordered[refused[0]].text[:200]
        parts.append(phrase("order_refused", ranks=sorted(refused), said=message))
    if expired:
        parts.append(phrase("order_expired", ranks=sorted(expired)))
    if gone:
        parts.append(phrase("order_killed" if order.verb == "kill" else "order_unknown", ranks=sorted(gone)))
    outcome = phrase("together", parts=parts)
    results = tuple((rank, answer.text) for rank, answer in sorted(operation.ordered.items()) if answer.text)
    good = (done or (gone and order.verb == "kill")) and not refused and not expired
    text = phrase("outcome_of", id=order.id, outcome=outcome)
    answer: Done | No = Done(text=text, results=results) if good else No(why=text)
    ending: tuple[Record, ...] = (OrderEnded(id=order.id, outcome=outcome, applied=len(done), ok=bool(good)),)
    incident = cluster.incidents.get(order.incident)
    if incident is not None and incident.closed is None:
        stacks = {rank: answer.text for rank, answer in operation.ordered.items()}
        ending += (IncidentAmended(id=incident.id, evidence=(of_ranks(stacks, incident),), stacks=""),)
    return Decision(
        ending,
        replies=tuple((waiter, answer) for waiter in operation.waiters),
    )


def poll(cluster: ClusterState, operation: PendingOperation, now: float) -> Decision:
    order = cluster.ledger.orders.get(operation.id)
    if order is None or order.outcome:
        return Decision((OperationEnded(operation.request),))
    ended = _end(cluster, operation, over=now - operation.began > EXPIRE_SECONDS)
    if ended or now - operation.sent < AGAIN_SECONDS:
        return ended
    silent = tuple((rank, life) for rank, life in operation.lives.items() if rank not in operation.ordered)
    return Decision((RanksAskedAgain(operation.request),), _commands(cluster, operation.id, order.verb, silent))
