"""Changes: all ranks of a job take one at the same step, or none does.

    asked     everyone is asked how far he is                               WhereAreYou → Standing
    proposed  for a step a little ahead of the foremost; each rank promises
              not to pass that step without a verdict                       Propose → Ready
    verdict   commit if all promised, abort if one refused or is missing.
              The server lets one verdict be written; a rank that reaches
              the step without one writes abort, and obeys what stands
    settled   each has taken it, or died before it could say so             Verdict → Applied

Everything is asked again until it is answered, here and after a restart of the weaver, and done once.
"""

from __future__ import annotations

import math
from dataclasses import replace

from torchloom.core.courses import (
    AskedAgain,
    AskersTold,
    Course,
    CourseBegan,
    CourseEnded,
    Lives,
    VerdictAsked,
    Wish,
)
from torchloom.core.decision import NOTHING, Decision, WantedVerdict
from torchloom.core.fabric import Fabric, Rank
from torchloom.core.ledger import Change, ChangePhase
from torchloom.core.presence import PRESENT
from torchloom.core.ranks import REPORT_ONLY
from torchloom.core.targets import names
from torchloom.messages import (
    ChangeDecided,
    ChangeProposed,
    ChangeSettled,
    Command,
    Committed,
    Done,
    IncidentOpened,
    No,
    Propose,
    RankId,
    Record,
    Standing,
    Value,
    Verdict,
    Welcome,
    WhereAreYou,
)

AGAIN_SECONDS = 0.25
"""Between two askings of a rank that has not answered."""
ANSWER_SECONDS = 5.0
"""A rank that has not answered for so long ends the change."""
REPLY_SECONDS = 10.0
"""Whoever waits for a change to take effect is told after this long that it is certain, if he said nothing else."""
ATTEMPTS = 4
"""A change whose step had passed before a rank heard of it is proposed anew, further ahead."""
ALL_READY = "all ranks are ready"
"""Why there is a commit, always; an abort has many reasons."""


# ── asked ──


def ask_where(fabric: Fabric, course: Course, lives: Lives) -> tuple[tuple[RankId, Command], ...]:
    return tuple((rank, WhereAreYou(term=fabric.term, incarnation=life, id=course.request)) for rank, life in lives)


# ── proposed ──


def standing(fabric: Fabric, course: Course) -> Decision:
    """Someone said how far he is; once all have, the step is chosen."""
    wish = course.wish
    if course.id or wish is None or len(course.standings) < len(course.lives):
        return NOTHING
    step = choose_step(fabric, wish, list(course.standings.values()))
    if step is None:
        front = max(course.standings.values(), key=lambda s: s.step)
        who = next(rank for rank, s in course.standings.items() if s is front)
        past = No(why=f"step {wish.ask.at_step} is past: {who} has finished {front.step}", hint="choose a later one")
        return _give_up(course, past)
    number = fabric.ledger.change_count + 1
    ask = wish.ask
    target = fabric.ledger.changes.get(wish.reverts)
    foremost = max(standing.step for standing in course.standings.values())
    ahead = target if target is not None and foremost < target.change.step == step else None  # nobody has it yet
    # It is to have no effect. But who was welcomed after a revert lacks what that reverted, and must have it set.
    withdraws = ahead.id if ahead is not None and not ahead.reverts else ""
    change = Committed(
        id=f"c{number}",
        number=number,
        step=step,
        action=wish.action,
        values={} if withdraws else ask.values,
        over=ask.over,
        key=f"c{number}-{course.request[:16]}",
        withdraws=withdraws,
    )
    record = ChangeProposed(
        change=change,
        job=ask.job,
        lives=tuple(course.lives.items()),
        request=course.request,
        operator=ask.operator,
        before=_before(fabric, course, wish, change) | (ahead.change.values if ahead is not None else {}),
        replica=ask.replica,
        rank=ask.rank,
        reverts=wish.reverts,
    )
    commands = _propose(fabric, course, change)
    return Decision((record,), commands, reason=f"{change.id}: {_what(record)} at step {step}")


def _before(fabric: Fabric, course: Course, wish: Wish, change: Committed) -> dict[str, Value]:
    """The values that a change finds: as a rank has just said, else as they were last set."""
    said = next((standing.knobs for standing in course.standings.values() if standing.knobs), {})
    ask = wish.ask
    last = fabric.ledger.value_of
    return {n: said[n] if n in said else last(ask.job, ask.replica, ask.rank, n) for n in change.values}


def choose_step(fabric: Fabric, wish: Wish, standings: list[Standing]) -> int | None:
    """A step a little ahead of the foremost rank: near, but not before the news can be everywhere. None: it is past."""
    front = max(standing.step for standing in standings)
    if all(standing.paused and standing.step == front for standing in standings):
        near = front  # they stand at that very boundary
    else:
        fastest = min((s.step_seconds for s in standings if s.step_seconds > 0), default=0.1)
        lead = fabric.settings.lead_seconds * 2 ** (wish.attempt - 1)
        near = front + 1 + math.ceil(lead / max(fastest, 1e-6))
    if wish.reverts in fabric.ledger.changes:
        near = max(near, fabric.ledger.changes[wish.reverts].change.step)  # what lies ahead is withdrawn when it comes
    wanted = wish.ask.at_step
    if wanted is None:
        return near
    return wanted if wanted > front or (wanted == near == front) else None


def _propose(fabric: Fabric, course: Course, change: Committed) -> tuple[tuple[RankId, Command], ...]:
    return tuple(
        (rank, Propose(term=fabric.term, incarnation=life, job=course.job, change=change))
        for rank, life in course.lives.items()
        if rank not in course.ready
    )


def ready(fabric: Fabric, course: Course, now: float) -> Decision:
    """Someone promised, or refused; once all have promised, or one will not, a verdict is wanted."""
    if course.committed or course.verdict_asked is not None or not course.id:
        return NOTHING
    return _judge(fabric, course, now)


def _judge(fabric: Fabric, course: Course, now: float) -> Decision:
    for rank, answer in course.ready.items():
        if not answer.ok:
            late = "late: " if answer.late else ""
            return _want(fabric, course, False, f"{late}{rank} refuses: {answer.why}", now)
    if len(course.ready) < len(course.lives):
        return NOTHING
    stranger = _others(fabric, course)
    if stranger:
        return _want(fabric, course, False, f"{names(stranger)} joined meanwhile", now)
    return _want(fabric, course, True, ALL_READY, now)


def _others(fabric: Fabric, course: Course) -> list[RankId]:
    """Ranks the change is for that were not asked, or live another life than they did then."""
    return [rank.id for rank in _joined(fabric, fabric.ledger.changes[course.id])]


def _joined(fabric: Fabric, change: Change) -> list[Rank]:
    asked = dict(change.lives)
    members = [fabric.ranks[rank] for rank in fabric.ranks_of_job.get(change.job, ()) if change.is_for(rank)]
    return [m for m in members if m.presence in PRESENT and asked.get(m.id) != m.incarnation]


def _want(fabric: Fabric, course: Course, commit: bool, reason: str, now: float) -> Decision:
    key = fabric.ledger.changes[course.id].change.key or course.id
    return Decision(
        notes=(VerdictAsked(course.request, now),),
        verdicts=(WantedVerdict(course.job, course.id, commit, reason, key),),
    )


# ── verdict ──


def verdict_known(fabric: Fabric, id: str, commit: bool, reason: str, now: float) -> Decision:
    """The server let this verdict stand."""
    change = fabric.ledger.changes.get(id)
    if change is None or change.phase is not ChangePhase.PROPOSED:
        return NOTHING
    course = fabric.watch.courses.find(id)
    reason = ALL_READY if commit else reason  # an earlier weaver may have written it, and this one wanted an abort
    record = ChangeDecided(id=id, commit=commit, reason=reason)
    told: list[tuple[RankId, Command]] = [
        (rank, Verdict(term=fabric.term, incarnation=life, id=id, commit=commit)) for rank, life in change.lives
    ]
    if commit:
        told += _welcome_others(fabric, change)
        replies: tuple[tuple[str, Done | No], ...] = ()
        if course and course.wish and not course.wish.ask.wait:
            replies = tuple((waiter, done(change)) for waiter in course.waiters)
        notes = (AskersTold(course.request),) if replies and course else ()
        return Decision((record,), tuple(told), replies=replies, notes=notes, reason=f"{id}: {reason}")
    if course and course.wish and course.wish.attempt < ATTEMPTS and _may_try_again(course, reason):
        wish = replace(course.wish, attempt=course.wish.attempt + 1)
        again = Course(course.request, course.job, course.lives, wish, began=now, sent=now, waiters=course.waiters)
        told += ask_where(fabric, again, tuple(course.lives.items()))
        return Decision((record,), tuple(told), notes=(CourseBegan(again),), reason=f"{id}: {reason}; once more")
    refused = No(why=f"{id} was not made: {reason}", hint="nothing was changed on any rank")
    replies = tuple((waiter, refused) for waiter in course.waiters) if course else ()
    return Decision((record,), tuple(told), replies=replies, reason=f"{id}: {reason}")


def _may_try_again(course: Course, reason: str) -> bool:
    """The step came too early for someone; further ahead it may do. A step that was asked for cannot be moved."""
    early = reason.startswith(("late:", "a rank reached"))
    return early and course.wish is not None and course.wish.ask.at_step is None


def _welcome_others(fabric: Fabric, change: Change) -> list[tuple[RankId, Command]]:
    """Ranks that joined between the question and the verdict learn of it with a new welcome."""
    return [
        (
            rank.id,
            Welcome(
                term=fabric.term,
                incarnation=rank.incarnation,
                beat_seconds=fabric.beat_seconds(),
                changes=(*fabric.ledger.in_force(rank.id), change.change),
            ),
        )
        for rank in _joined(fabric, change)
    ]


# ── settled ──


def applied(fabric: Fabric, course: Course) -> Decision:
    """Someone took it; once all have, it is settled. (Who is gone is looked for as time passes.)"""
    return NOTHING if len(course.applied) < len(course.lives) else _settled(fabric, course)


def _settled(fabric: Fabric, course: Course) -> Decision:
    change = fabric.ledger.changes.get(course.id)
    if change is None or change.phase is not ChangePhase.COMMITTED:
        return NOTHING
    gone = [r for r, life in course.lives.items() if r not in course.applied and not fabric.lives(r, life)]
    if len(course.applied) + len(gone) < len(course.lives):
        return NOTHING
    failed = [rank for rank, answer in course.applied.items() if not answer.ok]
    taken = len(course.applied) - len(failed)
    parts = [f"applied at step {change.change.step} on {taken} rank{'s' if taken != 1 else ''}"] if taken else []
    if failed:
        parts.append(f"{names(failed)} failed: {course.applied[failed[0]].result}")
    if gone:
        parts.append(f"unknown for {names(gone)}, gone in between")
    outcome = "; ".join(parts)
    record = ChangeSettled(id=course.id, applied=taken, outcome=outcome, failed=len(failed), unknown=tuple(gone))
    # Who is gone may have taken it, and its next life will.
    astray = failed if change.change.action == "set" and (taken or gone) else []
    results = tuple((rank, answer.result) for rank, answer in sorted(course.applied.items()) if answer.result)
    answer: Done | No = Done(text=f"{course.id}: {outcome}", change=course.id, step=change.change.step, results=results)
    if failed or not taken:
        answer = No(why=f"{course.id}: {outcome}")
    replies = tuple((waiter, answer) for waiter in course.waiters)
    records = (record, *_disagree(fabric, course, astray))
    return Decision(records, replies=replies, reason=f"{course.id}: {outcome}")


def _disagree(fabric: Fabric, course: Course, astray: list[RankId]) -> list[Record]:
    """Ranks that say themselves that they have not what their peers have; their beats may have said so before."""
    told = {incident.subject for incident in fabric.incidents.values()}
    news = [rank for rank in sorted(astray) if f"{rank}#{course.id}" not in told]
    return [
        IncidentOpened(
            id=fabric.incidents.next_id(offset),
            what=f"rank {rank} disagrees with its peers",
            subject=f"{rank}#{course.id}",
            job=course.job,
            evidence=(f"change {course.id} failed there: {course.applied[rank].result}",),
            decision=REPORT_ONLY,
            reason="its peers take the change and it did not",
        )
        for offset, rank in enumerate(news)
    ]


# ── time ──


def tend(fabric: Fabric, course: Course, now: float) -> Decision:
    """Ask again who has not answered; end what takes too long."""
    change = fabric.ledger.changes.get(course.id) if course.id else None
    if course.id and change is None:
        return _give_up(course, No(why=f"{course.id}: the run of {course.job} that it was for is over"))
    gone = [rank for rank, life in course.lives.items() if not fabric.lives(rank, life)]
    if change is None:
        return _tend_inquiry(fabric, course, gone, now)
    if change.phase is ChangePhase.PROPOSED:
        return _tend_proposal(fabric, course, change, gone, now)
    settled = _settled(fabric, course)
    if settled:
        return settled
    if now - course.sent < 4 * AGAIN_SECONDS:
        return NOTHING
    again = tuple(
        (rank, Verdict(term=fabric.term, incarnation=life, id=course.id, commit=True))
        for rank, life in course.lives.items()
        if rank not in course.applied and rank not in gone
    )
    replies: tuple[tuple[str, Done], ...] = ()
    notes: tuple[AskedAgain | AskersTold, ...] = (AskedAgain(course.request, now),)
    patience = course.wish.ask.patience if course.wish else REPLY_SECONDS
    if course.waiters and now - course.began > patience:
        replies = tuple((waiter, done(change, course)) for waiter in course.waiters)
        notes = (*notes, AskersTold(course.request))
    return Decision(commands=again, notes=notes, replies=replies)


def _tend_inquiry(fabric: Fabric, course: Course, gone: list[RankId], now: float) -> Decision:
    silent = [rank for rank in course.lives if rank not in course.standings]
    if gone:
        return _give_up(course, No(why=f"{names(gone)} went away meanwhile", hint="nothing was changed"))
    if now - course.began > ANSWER_SECONDS:
        return _give_up(course, No(why=f"expired: {names(silent)} does not answer", hint="nothing was changed"))
    if now - course.sent < AGAIN_SECONDS:
        return NOTHING
    lives = tuple((rank, course.lives[rank]) for rank in silent)
    return Decision(commands=ask_where(fabric, course, lives), notes=(AskedAgain(course.request, now),))


def _tend_proposal(fabric: Fabric, course: Course, change: Change, gone: list[RankId], now: float) -> Decision:
    if course.verdict_asked is not None and now - course.verdict_asked < ANSWER_SECONDS:
        return NOTHING
    if gone:
        return _want(fabric, course, False, f"{names(gone)} went away", now)
    judged = _judge(fabric, course, now)
    if judged:
        return judged
    if now - course.began > ANSWER_SECONDS:
        silent = [rank for rank in course.lives if rank not in course.ready]
        return _want(fabric, course, False, f"expired: {names(silent)} did not answer", now)
    if now - course.sent < AGAIN_SECONDS:
        return NOTHING
    return Decision(commands=_propose(fabric, course, change.change), notes=(AskedAgain(course.request, now),))


def _give_up(course: Course, why: No) -> Decision:
    replies = tuple((waiter, why) for waiter in course.waiters)
    return Decision(replies=replies, notes=(CourseEnded(course.request),), reason=f"{course.job}: {why.why}")


# ── words ──


def done(change: Change, course: Course | None = None) -> Done:
    if change.phase is ChangePhase.SETTLED:
        text = f"{change.id}: {change.outcome}"
    else:
        reached = f"; {len(course.applied)} of {len(course.lives)} ranks have reached it" if course else ""
        count = len(change.lives)
        on = f"on all {count} ranks" if count > 1 else "on its rank"
        what = f"{change.reverts} is withdrawn: nothing happens" if change.change.withdraws else "takes effect"
        text = f"{change.id}: {what} at step {change.change.step} {on}{reached}"
    return Done(text=text, change=change.id, step=change.change.step)


def _what(record: ChangeProposed) -> str:
    if record.change.action != "set":
        return f"{record.change.action} {record.job}"
    if record.change.withdraws:
        return f"{record.change.withdraws} is withdrawn"
    return ", ".join(f"{name} {record.before.get(name)} → {value}" for name, value in record.change.values.items())
