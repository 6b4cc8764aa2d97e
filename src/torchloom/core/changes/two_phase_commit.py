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
from typing import Literal

from msgspec.structs import replace

from torchloom.core.decision import NOTHING, Decision, WantedVerdict
from torchloom.core.incident_ids import provisional
from torchloom.core.ranks.lifecycle import REPORT_ONLY
from torchloom.core.state.change_ledger import Change, ChangePhase, abort_phrase
from torchloom.core.state.cluster import Fabric, Rank
from torchloom.core.state.pending_operations import (
    AskedAgain,
    AskersTold,
    Course,
    CourseBegan,
    CourseEnded,
    Lives,
    VerdictAsked,
    Wish,
)
from torchloom.core.state.presence import PRESENT
from torchloom.protocol.ids import RankId
from torchloom.protocol.incident_records import About, IncidentOpened
from torchloom.protocol.knob_values import Value
from torchloom.protocol.operator import Done, No
from torchloom.protocol.phrase import phrase
from torchloom.protocol.rank import Command, Committed, Propose, Standing, Verdict, Welcome, WhereAreYou
from torchloom.protocol.records import Abort, ChangeDecided, ChangeProposed, ChangeSettled, Record

AGAIN_SECONDS = 0.25
"""Between two askings of a rank that has not answered."""
ANSWER_SECONDS = 5.0
"""A rank that has not answered for so long ends the change."""
REPLY_SECONDS = 10.0
"""Whoever waits for a change to take effect is told after this long that it is certain, if he said nothing else."""
ATTEMPTS = 4
"""A change whose step had passed before a rank heard of it is proposed anew, further ahead."""


# ── asked ──


def ask_where(fabric: Fabric, request: str, lives: Lives) -> tuple[tuple[RankId, Command], ...]:
    return tuple((rank, WhereAreYou(term=fabric.term, incarnation=life, id=request)) for rank, life in lives)


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
        past = phrase("step_past", step=wish.ask.at_step, rank=who, finished=front.step)
        return _give_up(course, No(why=past, hint=phrase("choose_later_step")))
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
    return Decision((record,), commands)


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


def ready(fabric: Fabric, course: Course) -> Decision:
    """Someone promised, or refused; once all have promised, or one will not, a verdict is wanted."""
    if course.committed or course.verdict_asked is not None or not course.id:
        return NOTHING
    return _judge(fabric, course)


def _judge(fabric: Fabric, course: Course) -> Decision:
    for rank, answer in course.ready.items():
        if not answer.ok:
            why: Literal["late", "refused"] = "late" if answer.late else "refused"
            return _want(fabric, course, Abort(why=why, ranks=(rank,), refusal=answer.why))
    if len(course.ready) < len(course.lives):
        return NOTHING
    stranger = _others(fabric, course)
    if stranger:
        return _want(fabric, course, Abort(why="joined", ranks=tuple(stranger)))
    return _want(fabric, course, None)


def _others(fabric: Fabric, course: Course) -> list[RankId]:
    """Ranks the change is for that were not asked, or live another life than they did then."""
    return [rank.id for rank in _joined(fabric, fabric.ledger.changes[course.id])]


def _joined(fabric: Fabric, change: Change) -> list[Rank]:
    asked = dict(change.lives)
    members = [fabric.ranks[rank] for rank in fabric.ranks_of_job.get(change.job, ()) if change.is_for(rank)]
    return [m for m in members if m.presence in PRESENT and asked.get(m.id) != m.incarnation]


def _want(fabric: Fabric, course: Course, abort: Abort | None) -> Decision:
    key = fabric.ledger.changes[course.id].change.key or course.id
    return Decision(
        (VerdictAsked(course.request),),
        verdicts=(WantedVerdict(course.job, course.id, abort is None, abort, key),),
    )


# ── verdict ──


def verdict_known(fabric: Fabric, id: str, commit: bool, wanted: Abort | None) -> Decision:
    """The server let this verdict stand."""
    change = fabric.ledger.changes.get(id)
    if change is None or change.phase is not ChangePhase.PROPOSED:
        return NOTHING
    course = fabric.watch.courses.find(id)
    # An earlier weaver may have written a commit where this one wants an abort; and a rank an abort, where it does not.
    abort = None if commit else wanted or Abort(why="overtaken")
    record = ChangeDecided(id=id, commit=commit, abort=abort)
    told: list[tuple[RankId, Command]] = [
        (rank, Verdict(term=fabric.term, incarnation=life, id=id, commit=commit)) for rank, life in change.lives
    ]
    if commit:
        told += _welcome_others(fabric, change)
        replies: tuple[tuple[str, Done | No], ...] = ()
        if course and course.wish and not course.wish.ask.wait:
            replies = tuple((waiter, done(change)) for waiter in course.waiters)
        over = (AskersTold(course.request),) if replies and course else ()
        return Decision((record, *over), tuple(told), replies=replies)
    assert abort is not None
    if course and course.wish and course.wish.attempt < ATTEMPTS and _may_try_again(course, abort):
        wish = replace(course.wish, attempt=course.wish.attempt + 1)
        again = CourseBegan(course.request, course.job, tuple(course.lives.items()), wish, tuple(course.waiters))
        told += ask_where(fabric, again.request, again.lives)
        return Decision((record, again), tuple(told))
    refused = No(why=phrase("change_aborted", id=id, why=abort_phrase(abort)), hint=phrase("no_rank_changed"))
    replies = tuple((waiter, refused) for waiter in course.waiters) if course else ()
    return Decision((record,), tuple(told), replies=replies)


def _may_try_again(course: Course, abort: Abort) -> bool:
    """The step came too early for someone; further ahead it may do. A step that was asked for cannot be moved."""
    return abort.why in {"late", "overtaken"} and course.wish is not None and course.wish.ask.at_step is None


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
    parts = [phrase("applied_on", step=change.change.step, count=taken)] if taken else []
    if failed:
        parts.append(phrase("failed_on", ranks=sorted(failed), why=course.applied[failed[0]].result))
    if gone:
        parts.append(phrase("unknown_on", ranks=sorted(gone)))
    outcome = phrase("together", parts=parts)
    record = ChangeSettled(id=course.id, applied=taken, outcome=outcome, failed=len(failed), unknown=tuple(gone))
    # Who is gone may have taken it, and its next life will.
    astray = failed if change.change.action == "set" and (taken or gone) else []
    results = tuple((rank, answer.result) for rank, answer in sorted(course.applied.items()) if answer.result)
    text = phrase("outcome_of", id=course.id, outcome=outcome)
    answer: Done | No = Done(text=text, change=course.id, step=change.change.step, results=results)
    if failed or not taken:
        answer = No(why=text)
    replies = tuple((waiter, answer) for waiter in course.waiters)
    records = (record, *_disagree(fabric, course, astray))
    return Decision(records, replies=replies)


def _disagree(fabric: Fabric, course: Course, astray: list[RankId]) -> list[Record]:
    """Ranks that say themselves that they have not what their peers have; their beats may have said so before."""
    told = [incident.about for incident in fabric.incidents.values()]
    news = [rank for rank in sorted(astray) if About(rank=rank, part=course.id) not in told]
    return [
        IncidentOpened(
            id=provisional("astray", rank, course.id),
            what=phrase("rank_astray", rank=rank),
            about=About(rank=rank, part=course.id),
            job=course.job,
            evidence=(phrase("change_failed_there", id=course.id, result=course.applied[rank].result),),
            decision=REPORT_ONLY,
            reason=phrase("peers_take_change"),
        )
        for rank in news
    ]


# ── time ──


def tend(fabric: Fabric, course: Course, now: float) -> Decision:
    """Ask again who has not answered; end what takes too long."""
    change = fabric.ledger.changes.get(course.id) if course.id else None
    if course.id and change is None:
        return _give_up(course, No(why=phrase("change_run_over", id=course.id, job=course.job)))
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
    records: tuple[AskedAgain | AskersTold, ...] = (AskedAgain(course.request),)
    patience = course.wish.ask.patience if course.wish else REPLY_SECONDS
    if course.waiters and now - course.began > patience:
        replies = tuple((waiter, done(change, course)) for waiter in course.waiters)
        records = (*records, AskersTold(course.request))
    return Decision(records, again, replies=replies)


def _tend_inquiry(fabric: Fabric, course: Course, gone: list[RankId], now: float) -> Decision:
    silent = [rank for rank in course.lives if rank not in course.standings]
    if gone:
        why = phrase("ranks_left_meanwhile", ranks=sorted(gone))
        return _give_up(course, No(why=why, hint=phrase("nothing_changed")))
    if now - course.began > ANSWER_SECONDS:
        why = phrase("rank_unanswering" if len(silent) == 1 else "ranks_unanswering", ranks=sorted(silent))
        return _give_up(course, No(why=why, hint=phrase("nothing_changed")))
    if now - course.sent < AGAIN_SECONDS:
        return NOTHING
    lives = tuple((rank, course.lives[rank]) for rank in silent)
    return Decision((AskedAgain(course.request),), ask_where(fabric, course.request, lives))


def _tend_proposal(fabric: Fabric, course: Course, change: Change, gone: list[RankId], now: float) -> Decision:
    if course.verdict_asked is not None and now - course.verdict_asked < ANSWER_SECONDS:
        return NOTHING
    if gone:
        return _want(fabric, course, Abort(why="gone", ranks=tuple(gone)))
    judged = _judge(fabric, course)
    if judged:
        return judged
    if now - course.began > ANSWER_SECONDS:
        silent = [rank for rank in course.lives if rank not in course.ready]
        return _want(fabric, course, Abort(why="silent", ranks=tuple(silent)))
    if now - course.sent < AGAIN_SECONDS:
        return NOTHING
    return Decision((AskedAgain(course.request),), _propose(fabric, course, change.change))


def _give_up(course: Course, why: No) -> Decision:
    replies = tuple((waiter, why) for waiter in course.waiters)
    return Decision((CourseEnded(course.request),), replies=replies)


# ── words ──


def done(change: Change, course: Course | None = None) -> Done:
    if change.phase is ChangePhase.SETTLED:
        text = phrase("outcome_of", id=change.id, outcome=change.outcome)
    else:
        text = phrase(
            "change_withdraws" if change.change.withdraws else "change_takes_effect",
            id=change.id,
            reverts=change.reverts,
            step=change.change.step,
            count=len(change.lives),
        )
        if course:
            text = phrase("change_reached", change=text, reached=len(course.applied), count=len(course.lives))
    return Done(text=text, change=change.id, step=change.change.step)
