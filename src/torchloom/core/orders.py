"""Orders: things a rank does at once, wherever it is in its step. Asked again until answered or expired; done once."""

from __future__ import annotations

from torchloom.core.courses import AskedAgain, AskerWaits, Course, CourseBegan, CourseEnded
from torchloom.core.decision import NOTHING, Decision
from torchloom.core.evidence import FOR_INCIDENT, of_ranks
from torchloom.core.fabric import Fabric
from torchloom.core.targets import find_target, names, split_group
from torchloom.messages import (
    Command,
    Done,
    IncidentAmended,
    No,
    Order,
    OrderEnded,
    OrderGiven,
    RankId,
    Record,
    Steer,
)

AGAIN_SECONDS = 0.5
EXPIRE_SECONDS = 10.0


def give(fabric: Fabric, ask: Steer, reply: str, now: float) -> Decision:
    if ask.request in fabric.watch.courses.by_request:
        return Decision(notes=(AskerWaits(ask.request, reply),))
    before = fabric.ledger.order_of(ask.request)
    if before is not None and before.outcome and ask.verb != "stacks":  # stacks are not kept: they are taken again
        text = f"{before.id}: {before.outcome}"
        return Decision(answer=Done(text=text) if before.ok else No(why=text))
    lives = find_target(fabric, ask.job, ask.replica, ask.rank)
    if isinstance(lives, No):
        return Decision(answer=lives)
    if ask.verb == "resume":
        alone = split_group(fabric, lives, ask.replica, ask.rank)
        if alone is not None:
            return Decision(answer=alone)
    id = f"o{fabric.ledger.order_count + 1}"
    course = Course(ask.request, ask.job, dict(lives), id=id, began=now, sent=now, waiters=[reply] if reply else [])
    record = OrderGiven(id=id, request=ask.request, verb=ask.verb, job=ask.job, lives=lives, operator=ask.operator)
    commands = _commands(fabric, course, ask.verb)
    reason = f"{id}: {ask.verb} {names(course.lives)} for {ask.operator}"
    return Decision((record,), commands, notes=(CourseBegan(course),), reason=reason)


def _commands(fabric: Fabric, course: Course, verb: str) -> tuple[tuple[RankId, Command], ...]:
    return tuple(
        (rank, Order(term=fabric.term, incarnation=life, id=course.id, verb=verb, seconds=EXPIRE_SECONDS))  # type: ignore[arg-type]
        for rank, life in course.lives.items()
        if rank not in course.ordered
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
    parts = [f"applied on {len(done)} rank{'s' if len(done) != 1 else ''}"] if done else []
    if refused:
        parts.append(f"refused by {names(refused)}: {course.ordered[refused[0]].text[:200]}")
    if expired:
        parts.append(f"expired for {names(expired)}, which did not answer")
    if gone:
        ended = "gone" if order.verb == "kill" else "unknown for"
        parts.append(f"{ended} {names(gone)}" + ("" if order.verb == "kill" else ", which died in between"))
    outcome = "; ".join(parts)
    results = tuple((rank, answer.text) for rank, answer in sorted(course.ordered.items()) if answer.text)
    good = (done or (gone and order.verb == "kill")) and not refused and not expired
    text = f"{order.id}: {outcome}"
    answer: Done | No = Done(text=text, results=results) if good else No(why=text)
    ending: tuple[Record, ...] = (OrderEnded(id=order.id, outcome=outcome, applied=len(done), ok=bool(good)),)
    incident = fabric.incidents.get(order.request.removeprefix(FOR_INCIDENT))
    if incident is not None and incident.closed is None:
        told = {rank: answer.text for rank, answer in course.ordered.items()}
        ending += (IncidentAmended(id=incident.id, evidence=(of_ranks(told, incident),)),)
    return Decision(
        ending,
        replies=tuple((waiter, answer) for waiter in course.waiters),
        reason=f"{order.id}: {outcome}",
    )


def tend(fabric: Fabric, course: Course, now: float) -> Decision:
    order = fabric.ledger.orders.get(course.id)
    if order is None or order.outcome:
        return Decision(notes=(CourseEnded(course.request),))
    ended = _ended(fabric, course, over=now - course.began > EXPIRE_SECONDS)
    if ended or now - course.sent < AGAIN_SECONDS:
        return ended
    return Decision(commands=_commands(fabric, course, order.verb), notes=(AskedAgain(course.request, now),))
