"""Changes: all ranks of a job take one at the same step, or none does.

    asked     every rank reports its step                                   QueryStep → StepReport
    proposed  for a step a little ahead of the foremost; each rank promises
              not to pass that step without a verdict                       Propose → Ready
    verdict   commit if all promised, abort if one refused or is missing.
              The server stores the first verdict only; a rank that reaches
              the step without one writes abort, and obeys the stored one
    settled   each rank has applied it, or died before it could report      Verdict → Applied

Every question is repeated until it is answered, also after a restart of the weaver, and every change is made once.
"""

from __future__ import annotations

import math
from typing import Literal

from msgspec.structs import replace

from torchloom.core.decision import NOTHING, Decision, WantedVerdict
from torchloom.core.incident_ids import provisional
from torchloom.core.ranks.lifecycle import REPORT_ONLY
from torchloom.core.state.change_ledger import Change, ChangePhase, abort_phrase
from torchloom.core.state.cluster import ClusterState
from torchloom.core.state.pending_operations import (
    ChangeRequest,
    Lives,
    OperationBegan,
    OperationEnded,
    PendingOperation,
    RanksAskedAgain,
    VerdictAsked,
    WaitersAnswered,
)
from torchloom.core.state.ranks import PRESENT, Rank
from torchloom.protocol.ids import RankId
from torchloom.protocol.operator import Done, No, SetKnobs
from torchloom.protocol.phrase import phrase
from torchloom.protocol.rank import ChangeSpec, Command, Propose, QueryStep, StepReport, Value, Verdict, Welcome
from torchloom.protocol.records import (
    Abort,
    About,
    ChangeDecided,
    ChangeProposed,
    ChangeSettled,
    IncidentOpened,
    Record,
)

AGAIN_SECONDS = 0.25
"""Between two questions to a rank that has not answered."""
ANSWER_SECONDS = 5.0
"""A rank that has not answered after this time ends the change."""
REPLY_SECONDS = 10.0
"""Default of `patience`: after this time an operator who waits for the effect learns that the change is certain."""
ATTEMPTS = 4
"""A change whose step had passed before it reached a rank is proposed again, for a later step."""


# ── asked ──


def query_steps(cluster: ClusterState, request: str, lives: Lives) -> tuple[tuple[RankId, Command], ...]:
    return tuple((rank, QueryStep(term=cluster.term, incarnation=life, id=request)) for rank, life in lives)


# ── proposed ──


def handle_step_report(cluster: ClusterState, operation: PendingOperation) -> Decision:
    """A rank reported its step; once all have, the step of the change is chosen."""
    change_request = operation.change_request
    if operation.id or change_request is None or len(operation.step_reports) < len(operation.lives):
        return NOTHING
    step = choose_step(cluster, change_request, list(operation.step_reports.values()))
    if step is None:
        front = max(operation.step_reports.values(), key=lambda s: s.step)
        who = next(rank for rank, s in operation.step_reports.items() if s is front)
        past = phrase("step_past", step=change_request.ask.at_step, rank=who, finished=front.step)
        return _give_up(operation, No(why=past, hint=phrase("choose_later_step")))
    number = cluster.ledger.change_count + 1
    ask = change_request.ask
    target = cluster.ledger.changes.get(change_request.reverts)
    foremost = max(standing.step for standing in operation.step_reports.values())
    ahead = target if target is not None and foremost < target.change.step == step else None  # no rank has it yet
    # Withdrawing it is enough. But a rank that joined after a revert lacks the reverted values: they must be set.
    withdraws = ahead.id if ahead is not None and not ahead.reverts else ""
    change = ChangeSpec(
        id=f"c{number}",
        number=number,
        step=step,
        action=change_request.action,
        values={} if withdraws else ask.values,
        over=ask.over,
        key=f"c{number}-{operation.request[:16]}",
        withdraws=withdraws,
    )
    record = ChangeProposed(
        change=change,
        job=ask.job,
        lives=tuple(operation.lives.items()),
        request=operation.request,
        operator=ask.operator,
        before=_read_values(cluster, operation, ask, change) | (ahead.change.values if ahead is not None else {}),
        replica=ask.replica,
        rank=ask.rank,
        reverts=change_request.reverts,
    )
    commands = _propose(cluster, operation, change)
    return Decision((record,), commands)


def _read_values(
    cluster: ClusterState, operation: PendingOperation, ask: SetKnobs, change: ChangeSpec
) -> dict[str, Value]:
    """The values that a change replaces: as a rank has just reported, else as they were last set."""
    values = next((report.knobs for report in operation.step_reports.values() if report.knobs), {})
    last = cluster.ledger.value_of
    return {n: values[n] if n in values else last(ask.job, ask.replica, ask.rank, n) for n in change.values}


def choose_step(cluster: ClusterState, change_request: ChangeRequest, step_reports: list[StepReport]) -> int | None:
    """A step shortly after the foremost rank, late enough for all ranks to learn of it. None if `at_step` is past."""
    front = max(standing.step for standing in step_reports)
    if all(standing.paused and standing.step == front for standing in step_reports):
        near = front  # they stand at that very boundary
    else:
        fastest = min((s.step_seconds for s in step_reports if s.step_seconds > 0), default=0.1)
        lead = cluster.settings.lead_seconds * 2 ** (change_request.attempt - 1)
        near = front + 1 + math.ceil(lead / max(fastest, 1e-6))
    if change_request.reverts in cluster.ledger.changes:
        near = max(
            near, cluster.ledger.changes[change_request.reverts].change.step
        )  # what lies ahead is withdrawn when it comes
    wanted = change_request.ask.at_step
    if wanted is None:
        return near
    return wanted if wanted > front or (wanted == near == front) else None


def _propose(
    cluster: ClusterState, operation: PendingOperation, change: ChangeSpec
) -> tuple[tuple[RankId, Command], ...]:
    return tuple(
        (rank, Propose(term=cluster.term, incarnation=life, job=operation.job, change=change))
        for rank, life in operation.lives.items()
        if rank not in operation.ready
    )


def handle_ready(cluster: ClusterState, operation: PendingOperation) -> Decision:
    """A rank promised or refused; once all have promised, or one refused, a verdict is requested."""
    if operation.committed or operation.verdict_asked is not None or operation.id not in cluster.ledger.changes:
        return NOTHING
    return _judge(cluster, operation)


def _judge(cluster: ClusterState, operation: PendingOperation) -> Decision:
    for rank, answer in operation.ready.items():
        if not answer.ok:
            why: Literal["late", "refused"] = "late" if answer.late else "refused"
            return _request_verdict(cluster, operation, Abort(why=why, ranks=(rank,), refusal=answer.why))
    if len(operation.ready) < len(operation.lives):
        return NOTHING
    stranger = _others(cluster, operation)
    if stranger:
        return _request_verdict(cluster, operation, Abort(why="joined", ranks=tuple(stranger)))
    return _request_verdict(cluster, operation, None)


def _others(cluster: ClusterState, operation: PendingOperation) -> list[RankId]:
    """Ranks that the change is for, and that were not asked in their present incarnation."""
    return [rank.id for rank in _find_newcomers(cluster, cluster.ledger.changes[operation.id])]


def _find_newcomers(cluster: ClusterState, change: Change) -> list[Rank]:
    asked = dict(change.lives)
    members = [rank for rank in cluster.ranks.of_job(change.job) if change.is_for(rank.id)]
    return [m for m in members if m.presence in PRESENT and asked.get(m.id) != m.incarnation]


def _request_verdict(cluster: ClusterState, operation: PendingOperation, abort: Abort | None) -> Decision:
    key = cluster.ledger.changes[operation.id].change.key or operation.id
    return Decision(
        (VerdictAsked(operation.request),),
        verdicts=(WantedVerdict(operation.job, operation.id, abort is None, abort, key),),
    )


# ── verdict ──


def handle_verdict(cluster: ClusterState, id: str, commit: bool, wanted: Abort | None) -> Decision:
    """The server has stored this verdict."""
    change = cluster.ledger.changes.get(id)
    if change is None or change.phase is not ChangePhase.PROPOSED:
        return NOTHING
    operation = cluster.runtime.operations.find(id)
    # An earlier weaver may have written a commit where this one wants an abort; and a rank an abort, where it does not.
    abort = None if commit else wanted or Abort(why="overtaken")
    record = ChangeDecided(id=id, commit=commit, abort=abort)
    commands: list[tuple[RankId, Command]] = [
        (rank, Verdict(term=cluster.term, incarnation=life, id=id, commit=commit)) for rank, life in change.lives
    ]
    if commit:
        commands += _welcome_newcomers(cluster, change)
        replies: tuple[tuple[str, Done | No], ...] = ()
        if operation and operation.change_request and not operation.change_request.ask.wait:
            replies = tuple((waiter, describe_success(change)) for waiter in operation.waiters)
        over = (WaitersAnswered(operation.request),) if replies and operation else ()
        return Decision((record, *over), tuple(commands), replies=replies)
    assert abort is not None
    if (
        operation
        and operation.change_request
        and operation.change_request.attempt < ATTEMPTS
        and _may_try_again(operation, abort)
    ):
        change_request = replace(operation.change_request, attempt=operation.change_request.attempt + 1)
        again = OperationBegan(
            operation.request, operation.job, tuple(operation.lives.items()), change_request, tuple(operation.waiters)
        )
        commands += query_steps(cluster, again.request, again.lives)
        return Decision((record, again), tuple(commands))
    refused = No(why=phrase("change_aborted", id=id, why=abort_phrase(abort)), hint=phrase("no_rank_changed"))
    replies = tuple((waiter, refused) for waiter in operation.waiters) if operation else ()
    return Decision((record,), tuple(commands), replies=replies)


def _may_try_again(operation: PendingOperation, abort: Abort) -> bool:
    """Whether only the step was too early for a rank. A step that the operator requested cannot be moved."""
    return (
        abort.why in {"late", "overtaken"}
        and operation.change_request is not None
        and operation.change_request.ask.at_step is None
    )


def _welcome_newcomers(cluster: ClusterState, change: Change) -> list[tuple[RankId, Command]]:
    """Ranks that joined between the question and the verdict receive the change in a new welcome."""
    return [
        (
            rank.id,
            Welcome(
                term=cluster.term,
                incarnation=rank.incarnation,
                beat_seconds=cluster.beat_seconds(),
                changes=(*cluster.ledger.in_force(rank.id), change.change),
            ),
        )
        for rank in _find_newcomers(cluster, change)
    ]


# ── settled ──


def handle_applied(cluster: ClusterState, operation: PendingOperation) -> Decision:
    """A rank applied the change; once all have, it is settled. (`poll` notices ranks that are gone.)"""
    return NOTHING if len(operation.applied) < len(operation.lives) else _settle(cluster, operation)


def _settle(cluster: ClusterState, operation: PendingOperation) -> Decision:
    change = cluster.ledger.changes.get(operation.id)
    if change is None or change.phase is not ChangePhase.COMMITTED:
        return NOTHING
    gone = [r for r, life in operation.lives.items() if r not in operation.applied and not cluster.lives(r, life)]
    if len(operation.applied) + len(gone) < len(operation.lives):
        return NOTHING
    failed = [rank for rank, answer in operation.applied.items() if not answer.ok]
    taken = len(operation.applied) - len(failed)
    parts = [phrase("applied_on", step=change.change.step, count=taken)] if taken else []
    if failed:
        parts.append(phrase("failed_on", ranks=sorted(failed), why=operation.applied[failed[0]].result))
    if gone:
        parts.append(phrase("unknown_on", ranks=sorted(gone)))
    outcome = phrase("together", parts=parts)
    record = ChangeSettled(id=operation.id, applied=taken, outcome=outcome, failed=len(failed), unknown=tuple(gone))
    # A rank that is gone may have applied it, and its next incarnation will.
    astray = failed if change.change.action == "set" and (taken or gone) else []
    results = tuple((rank, answer.result) for rank, answer in sorted(operation.applied.items()) if answer.result)
    text = phrase("outcome_of", id=operation.id, outcome=outcome)
    answer: Done | No = Done(text=text, change=operation.id, step=change.change.step, results=results)
    if failed or not taken:
        answer = No(why=text)
    replies = tuple((waiter, answer) for waiter in operation.waiters)
    records = (record, *_report_failed(cluster, operation, astray))
    return Decision(records, replies=replies)


def _report_failed(cluster: ClusterState, operation: PendingOperation, astray: list[RankId]) -> list[Record]:
    """Open incidents about ranks on which the change failed, unless their beats have led to one."""
    reported = [incident.about for incident in cluster.incidents.values()]
    news = [rank for rank in sorted(astray) if About(rank=rank, part=operation.id) not in reported]
    return [
        IncidentOpened(
            id=provisional("astray", rank, operation.id),
            what=phrase("rank_astray", rank=rank),
            about=About(rank=rank, part=operation.id),
            job=operation.job,
            evidence=(phrase("change_failed_there", id=operation.id, result=operation.applied[rank].result),),
            decision=REPORT_ONLY,
            reason=phrase("peers_take_change"),
        )
        for rank in news
    ]


# ── time ──


def poll(cluster: ClusterState, operation: PendingOperation, now: float) -> Decision:
    """Repeat questions that were not answered; end a change that takes too long."""
    change = cluster.ledger.changes.get(operation.id) if operation.id else None
    if operation.id and change is None:
        return _give_up(operation, No(why=phrase("change_run_over", id=operation.id, job=operation.job)))
    gone = [rank for rank, life in operation.lives.items() if not cluster.lives(rank, life)]
    if change is None:
        return _poll_inquiry(cluster, operation, gone, now)
    if change.phase is ChangePhase.PROPOSED:
        return _poll_proposal(cluster, operation, change, gone, now)
    settled = _settle(cluster, operation)
    if settled:
        return settled
    if now - operation.sent < 4 * AGAIN_SECONDS:
        return NOTHING
    again = tuple(
        (rank, Verdict(term=cluster.term, incarnation=life, id=operation.id, commit=True))
        for rank, life in operation.lives.items()
        if rank not in operation.applied and rank not in gone
    )
    replies: tuple[tuple[str, Done], ...] = ()
    records: tuple[RanksAskedAgain | WaitersAnswered, ...] = (RanksAskedAgain(operation.request),)
    patience = operation.change_request.ask.patience if operation.change_request else REPLY_SECONDS
    if operation.waiters and now - operation.began > patience:
        replies = tuple((waiter, describe_success(change, operation)) for waiter in operation.waiters)
        records = (*records, WaitersAnswered(operation.request))
    return Decision(records, again, replies=replies)


def _poll_inquiry(cluster: ClusterState, operation: PendingOperation, gone: list[RankId], now: float) -> Decision:
    silent = [rank for rank in operation.lives if rank not in operation.step_reports]
    if gone:
        why = phrase("ranks_left_meanwhile", ranks=sorted(gone))
        return _give_up(operation, No(why=why, hint=phrase("nothing_changed")))
    if now - operation.began > ANSWER_SECONDS:
        why = phrase("rank_unanswering" if len(silent) == 1 else "ranks_unanswering", ranks=sorted(silent))
        return _give_up(operation, No(why=why, hint=phrase("nothing_changed")))
    if now - operation.sent < AGAIN_SECONDS:
        return NOTHING
    lives = tuple((rank, operation.lives[rank]) for rank in silent)
    return Decision((RanksAskedAgain(operation.request),), query_steps(cluster, operation.request, lives))


def _poll_proposal(
    cluster: ClusterState, operation: PendingOperation, change: Change, gone: list[RankId], now: float
) -> Decision:
    if operation.verdict_asked is not None and now - operation.verdict_asked < ANSWER_SECONDS:
        return NOTHING
    if gone:
        return _request_verdict(cluster, operation, Abort(why="gone", ranks=tuple(gone)))
    judged = _judge(cluster, operation)
    if judged:
        return judged
    if now - operation.began > ANSWER_SECONDS:
        silent = [rank for rank in operation.lives if rank not in operation.ready]
        return _request_verdict(cluster, operation, Abort(why="silent", ranks=tuple(silent)))
    if now - operation.sent < AGAIN_SECONDS:
        return NOTHING
    return Decision((RanksAskedAgain(operation.request),), _propose(cluster, operation, change.change))


def _give_up(operation: PendingOperation, why: No) -> Decision:
    replies = tuple((waiter, why) for waiter in operation.waiters)
    return Decision((OperationEnded(operation.request),), replies=replies)


# ── answers ──


def describe_success(change: Change, operation: PendingOperation | None = None) -> Done:
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
        if operation:
            text = phrase("change_reached", change=text, reached=len(operation.applied), count=len(operation.lives))
    return Done(text=text, change=change.id, step=change.change.step)
