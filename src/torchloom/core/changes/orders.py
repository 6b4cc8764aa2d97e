"""Orders: things a rank does at once, wherever it is in its step. Asked again until answered or expired; done once."""

from __future__ import annotations

from torchloom.core.changes.targets import find_target, split_group
from torchloom.core.decision import NOTHING, Decision
from torchloom.core.incidents.stack_evidence import of_ranks
from torchloom.core.state.cluster import Fabric
from torchloom.core.state.pending_operations import AskedAgain, AskerWaits, Course, CourseEnded, Lives
from torchloom.protocol.ids import RankId
from torchloom.protocol.incident_records import IncidentAmended
from torchloom.protocol.operator import Done, No, Steer
from torchloom.protocol.phrase import phrase
from torchloom.protocol.rank import Command, Order
from torchloom.protocol.records import OrderEnded, OrderGiven, Record

AGAIN_SECONDS = 0.5
EXPIRE_SECONDS = 10.0


def give(fabric: Fabric, ask: Steer, reply: str, incident: str = "") -> Decision:
    """Begin it; `incident` is what it is done for."""
    if ask.request in fabric.watch.courses.by_request:
        return Decision((AskerWaits(ask.request, reply),))
    before = fabric.ledger.order_of(ask.request)
    if before is not None and before.outcome and ask.verb != "stacks":  # stacks are not kept: they are taken again
        text = phrase("outcome_of", id=before.id, outcome=before.outcome)
        return Decision(answer=Done(text=text) if before.ok else No(why=text))
    lives = find_target(fabric, ask.job, ask.replica, ask.rank)
    if isinstance(lives, No):
        return Decision(answer=lives)
    if ask.verb == "resume":
        alone = split_group(fabric, lives, ask.replica, ask.rank)
        if alone is not None:
            return Decision(answer=alone)
    id = f"o{fabric.ledger.order_count + 1}"
    record = OrderGiven(
        id=id,
        request=ask.request,
        verb=ask.verb,
        job=ask.job,
        lives=lives,
        operator=ask.operator,
        incident=incident,
    )
    waits = (AskerWaits(ask.request, reply),) if reply else ()
    return Decision((record, *waits), _commands(fabric, id, ask.verb, lives))


def _commands(fabric: Fabric, id: str, verb: str, lives: Lives) -> tuple[tuple[RankId, Command], ...]:
    return tuple(
        (rank, Order(term=fabric.term, incarnation=life, id=id, verb=verb, seconds=EXPIRE_SECONDS))  # type: ignore[arg-type]
        for rank, life in lives
    )


def ordered(fabric: Fabric, course: Course) -> Decision:
    """Someone answered; once all have, the order has ended. (Who cannot any more is looked for as time passes.)"""
    return NOTHING if len(course.ordered) < len(course.lives) else _ended(fabric, course, over=False)


def _ended(fabric: Fabric, course: Course, over: bool) -> Decision:
    order = fabric.ledger.orders.get(course.id)
    if order is None or order.outcome:
        return NOTHING
    silent = [rank for rank in course.lives if rank not in course.ordered]
    gone = [rank for rank in silent if not fabric.lives(rank, course.lives[rank])]
    if len(gone) < len(silent) and not over:
        return NOTHING
    expired = [rank for rank in silent if rank not in gone]
    done = [rank for rank, answer in course.ordered.items() if answer.outcome == "applied"]
    refused = [rank for rank, answer in course.ordered.items() if answer.outcome != "applied"]
    parts = [phrase("order_applied", count=len(done))] if done else []
    if refused:
        said = course.ordered[refused[0]].text[:200]
        parts.append(phrase("order_refused", ranks=sorted(refused), said=said))
    if expired:
        parts.append(phrase("order_expired", ranks=sorted(expired)))
    if gone:
        parts.append(phrase("order_killed" if order.verb == "kill" else "order_unknown", ranks=sorted(gone)))
    outcome = phrase("together", parts=parts)
    results = tuple((rank, answer.text) for rank, answer in sorted(course.ordered.items()) if answer.text)
    good = (done or (gone and order.verb == "kill")) and not refused and not expired
    text = phrase("outcome_of", id=order.id, outcome=outcome)
    answer: Done | No = Done(text=text, results=results) if good else No(why=text)
    ending: tuple[Record, ...] = (OrderEnded(id=order.id, outcome=outcome, applied=len(done), ok=bool(good)),)
    incident = fabric.incidents.get(order.incident)
    if incident is not None and incident.closed is None:
        told = {rank: answer.text for rank, answer in course.ordered.items()}
        ending += (IncidentAmended(id=incident.id, evidence=(of_ranks(told, incident),), stacks=""),)
    return Decision(
        ending,
        replies=tuple((waiter, answer) for waiter in course.waiters),
    )


def tend(fabric: Fabric, course: Course, now: float) -> Decision:
    order = fabric.ledger.orders.get(course.id)
    if order is None or order.outcome:
        return Decision((CourseEnded(course.request),))
    ended = _ended(fabric, course, over=now - course.began > EXPIRE_SECONDS)
    if ended or now - course.sent < AGAIN_SECONDS:
        return ended
    silent = tuple((rank, life) for rank, life in course.lives.items() if rank not in course.ordered)
    return Decision((AskedAgain(course.request),), _commands(fabric, course.id, order.verb, silent))
