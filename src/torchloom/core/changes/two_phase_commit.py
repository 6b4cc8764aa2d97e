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
from collections.abc import Mapping
from typing import Literal

from msgspec.structs import replace

from torchloom.core.changes.batch_rules import with_rules
from torchloom.core.decision import NOTHING, Commands, Decision, Refused, WantedVerdict, address
from torchloom.core.ranks.lifecycle import REPORT_ONLY, open_incident, welcome
from torchloom.core.state import pending_operations as pending
from torchloom.core.state.change_ledger import Change, ChangePhase, abort_phrase
from torchloom.core.state.cluster import ClusterState
from torchloom.core.state.pending_operations import ChangeRequest, Lives, PendingOperation
from torchloom.core.state.rank_states import PRESENT, Rank
from torchloom.protocol.data_loading import DataPlace
from torchloom.protocol.ids import RankId
from torchloom.protocol.operator import Done, No
from torchloom.protocol.phrase import phrase
from torchloom.protocol.rank import ChangeSpec, Propose, QueryStep, Ready, StepReport, Verdict
from torchloom.protocol.records import Abort, About, ChangeDecided, ChangeProposed, ChangeSettled, Record

AGAIN_SECONDS = 0.25
"""Between two questions to a rank that has not answered."""
ANSWER_SECONDS = 5.0
"""A rank that has not answered after this time ends the change."""
REPLY_SECONDS = 10.0
"""Default of `patience`: after this time an operator who waits for the effect learns that the change is certain."""
ATTEMPTS = 4
"""A change whose step had passed before it reached a rank is proposed again, for a later step."""


# ── asked ──


def query_steps(cluster: ClusterState, request: str, lives: Lives) -> Commands:
    return address(lives, QueryStep(term=cluster.term, incarnation="", id=request))


# ── proposed ──


def handle_step_report(cluster: ClusterState, operation: PendingOperation) -> Decision:
    """A rank reported its step; once all have, the step of the change is chosen."""
    change_request = operation.change_request
    if operation.id or change_request is None or len(operation.step_reports) < len(operation.lives):
        return NOTHING
    step = choose_step(cluster, change_request, list(operation.step_reports.values()))
    foremost, front = max(operation.step_reports.items(), key=lambda item: item[1].step)
    ask = change_request.ask
    if step is None:
        past = phrase("step_past", step=ask.at_step, rank=foremost, finished=front.step)
        return _give_up(operation, No(why=past, hint=phrase("choose_later_step")))
    # The values before it: as a rank has just reported, else as they were last set.
    reported = next((report.knobs for report in operation.step_reports.values() if report.knobs), {})
    current = cluster.ledger.values_of(ask.job, ask.replica, ask.rank) | reported
    try:
        values = with_rules(ask, cluster.ledger.specs(ask.job), current)
    except Refused as refused:
        return _give_up(operation, refused.answer)
    number = cluster.ledger.change_count + 1
    target = cluster.ledger.changes.get(change_request.reverts)
    ahead = target if target is not None and front.step < target.change.step == step else None  # no rank has it yet
    # Withdrawing it is enough. But a rank that joined after a revert lacks the reverted values: they must be set.
    withdraws = ahead.id if ahead is not None and not ahead.reverts else ""
    change = ChangeSpec(
        id=f"c{number}",
        number=number,
        step=step,
        action=change_request.action,
        values={} if withdraws else values,
        over=ask.over,
        key=f"c{number}-{operation.request[:16]}",
        withdraws=withdraws,
        finished=min(report.step for report in operation.step_reports.values()),
    )
    before = {name: current[name] for name in change.values}
    record = ChangeProposed.from_fields(
        ask,
        change=change,
        lives=tuple(operation.lives.items()),
        before=before | (ahead.change.values if ahead is not None else {}),
        reverts=change_request.reverts,
    )
    return Decision((record,), _propose(cluster, operation, change))


def choose_step(cluster: ClusterState, change_request: ChangeRequest, step_reports: list[StepReport]) -> int | None:
    """A step shortly after the foremost rank, late enough for all ranks to learn of it. None if `at_step` is past."""
    front = max(standing.step for standing in step_reports)
    if all(standing.paused and standing.step == front for standing in step_reports):
        near = front  # they stand at that very boundary
    else:
        fastest = min((s.step_seconds for s in step_reports if s.step_seconds > 0), default=0.1)
        lead = cluster.settings.lead_seconds * 2 ** (change_request.attempt - 1)
        near = front + 1 + math.ceil(lead / max(fastest, 1e-6))
    target = cluster.ledger.changes.get(change_request.reverts)
    if target is not None:
        near = max(near, target.change.step)  # what lies ahead is withdrawn when it comes
    wanted = change_request.ask.at_step
    if wanted is None:
        return near
    return wanted if wanted > front or (wanted == near == front) else None


def _propose(cluster: ClusterState, operation: PendingOperation, change: ChangeSpec) -> Commands:
    silent = [(rank, life) for rank, life in operation.lives.items() if rank not in operation.ready]
    return address(silent, Propose(term=cluster.term, incarnation="", job=operation.job, change=change))


def handle_ready(cluster: ClusterState, operation: PendingOperation) -> Decision:
    """A rank promised or refused; once all have promised, or one refused, a verdict is requested."""
    change = cluster.ledger.changes.get(operation.id)
    if change is None or change.phase is not ChangePhase.PROPOSED or operation.verdict_asked is not None:
        return NOTHING
    return _judge(cluster, operation)


def _judge(cluster: ClusterState, operation: PendingOperation) -> Decision:
    for rank, answer in operation.ready.items():
        if not answer.ok:
            why: Literal["late", "refused"] = "late" if answer.late else "refused"
            return _request_verdict(cluster, operation, Abort(why=why, ranks=(rank,), refusal=answer.why))
    if len(operation.ready) < len(operation.lives):
        return NOTHING
    unequal = _find_unequal(operation.ready)
    if unequal:
        return _request_verdict(cluster, operation, Abort(why="unequal", ranks=unequal))
    newcomers = tuple(rank.id for rank in _find_newcomers(cluster, cluster.ledger.changes[operation.id]))
    return _request_verdict(cluster, operation, Abort(why="joined", ranks=newcomers) if newcomers else None)


def _find_unequal(answers: Mapping[RankId, Ready]) -> tuple[RankId, ...]:
    """Ranks whose loader was at another place than that of the first rank of their replica."""
    first: dict[str, DataPlace | None] = {}
    for rank in sorted(answers):
        first.setdefault(rank.replica, answers[rank].place)
    return tuple(rank for rank, answer in sorted(answers.items()) if answer.place != first[rank.replica])


def _find_newcomers(cluster: ClusterState, change: Change) -> list[Rank]:
    """Ranks that the change is for, and that were not asked in their present incarnation."""
    lives = dict(change.lives)
    members = [rank for rank in cluster.ranks.of_job(change.job) if change.is_for(rank.id)]
    return [m for m in members if m.presence in PRESENT and lives.get(m.id) != m.incarnation]


def _request_verdict(cluster: ClusterState, operation: PendingOperation, abort: Abort | None) -> Decision:
    key = cluster.ledger.changes[operation.id].change.key or operation.id
    return Decision(
        (pending.VerdictAsked(operation.request),),
        verdicts=(WantedVerdict(operation.job, operation.id, abort is None, abort, key),),
    )


# ── verdict ──


def handle_verdict(cluster: ClusterState, id: str, commit: bool, wanted: Abort | None) -> Decision:
    """The server has stored this verdict."""
    change = cluster.ledger.changes.get(id)
    if change is None or change.phase is not ChangePhase.PROPOSED:
        return NOTHING
    operation = cluster.runtime.operations.find(id)
    change_request = operation.change_request if operation is not None else None
    waiters = tuple(operation.waiters) if operation is not None else ()
    commands = address(change.lives, Verdict(term=cluster.term, incarnation="", id=id, commit=commit))
    # An earlier weaver may have written a commit where this one wants an abort; and a rank an abort, where it does not.
    if commit:
        # Ranks that joined between the question and the verdict receive the change in a new welcome.
        newcomers = tuple(
            (rank.id, welcome(cluster, rank.incarnation, (*cluster.ledger.in_force(rank.id), change.change)))
            for rank in _find_newcomers(cluster, change)
        )
        decision = Decision((ChangeDecided(id=id, commit=True),), commands + newcomers)
        if not waiters or change_request is None or change_request.ask.wait:
            return decision
        replies = tuple((waiter, describe_success(cluster, change)) for waiter in waiters)
        return decision + Decision((pending.WaitersAnswered(change.request),), replies=replies)
    abort = wanted or Abort(why="overtaken")
    decision = Decision((ChangeDecided(id=id, commit=False, abort=abort),), commands)
    if change_request is not None and _may_try_again(change_request, abort):
        later = replace(change_request, attempt=change_request.attempt + 1)
        again = pending.OperationBegan(change.request, change.job, change.lives, later, waiters)
        return decision + Decision((again,), query_steps(cluster, change.request, change.lives))
    refused = No(why=phrase("change_aborted", id=id, why=abort_phrase(abort)), hint=phrase("no_rank_changed"))
    return decision + Decision(replies=tuple((waiter, refused) for waiter in waiters))


def _may_try_again(change_request: ChangeRequest, abort: Abort) -> bool:
    """Whether only the step was too early for a rank. A step that the operator requested cannot be moved."""
    too_early = abort.why in {"late", "overtaken"} and change_request.ask.at_step is None
    return too_early and change_request.attempt < ATTEMPTS


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
    pending = any(answer.pending for answer in operation.applied.values())
    record = ChangeSettled(
        id=operation.id, applied=taken, outcome=outcome, failed=len(failed), unknown=tuple(gone), pending=pending
    )
    # A rank that is gone may have applied it, and its next incarnation will.
    astray = failed if change.change.action == "set" and (taken or gone) else []
    results = tuple((rank, answer.result) for rank, answer in sorted(operation.applied.items()) if answer.result)
    text = phrase("outcome_of", id=operation.id, outcome=outcome)
    answer: Done | No = replace(describe_success(cluster, change), text=text, results=results)
    if failed or not taken:
        answer = No(why=text)
    replies = tuple((waiter, answer) for waiter in operation.waiters)
    return Decision((record, *_report_failed(cluster, operation, astray)), replies=replies)


def _report_failed(cluster: ClusterState, operation: PendingOperation, astray: list[RankId]) -> list[Record]:
    """Open incidents about ranks on which the change failed, unless their beats have led to one."""
    reported = [incident.about for incident in cluster.incidents.values()]
    news = [rank for rank in sorted(astray) if About(rank=rank, part=operation.id) not in reported]
    return [
        open_incident(
            phrase("rank_astray", rank=rank),
            rank,
            evidence=(phrase("change_failed_there", id=operation.id, result=operation.applied[rank].result),),
            decision=REPORT_ONLY,
            reason=phrase("peers_take_change"),
            part=operation.id,
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
    if settled or now - operation.sent < 4 * AGAIN_SECONDS:
        return settled
    silent = [(rank, life) for rank, life in operation.lives.items() if rank not in operation.applied]
    missing = [(rank, life) for rank, life in silent if rank not in gone]
    commands = address(missing, Verdict(term=cluster.term, incarnation="", id=operation.id, commit=True))
    again = Decision((pending.RanksAskedAgain(operation.request),), commands)
    patience = operation.change_request.ask.patience if operation.change_request else REPLY_SECONDS
    if not operation.waiters or now - operation.began <= patience:
        return again
    replies = tuple((waiter, describe_success(cluster, change, operation)) for waiter in operation.waiters)
    return again + Decision((pending.WaitersAnswered(operation.request),), replies=replies)


def _poll_inquiry(cluster: ClusterState, operation: PendingOperation, gone: list[RankId], now: float) -> Decision:
    silent = tuple((rank, life) for rank, life in operation.lives.items() if rank not in operation.step_reports)
    if gone:
        why = phrase("ranks_left_meanwhile", ranks=sorted(gone))
        return _give_up(operation, No(why=why, hint=phrase("nothing_changed")))
    if now - operation.began > ANSWER_SECONDS:
        why = phrase("ranks_unanswering", ranks=sorted(rank for rank, _ in silent))
        return _give_up(operation, No(why=why, hint=phrase("nothing_changed")))
    if now - operation.sent < AGAIN_SECONDS:
        return NOTHING
    return Decision((pending.RanksAskedAgain(operation.request),), query_steps(cluster, operation.request, silent))


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
    return Decision((pending.RanksAskedAgain(operation.request),), _propose(cluster, operation, change.change))


def _give_up(operation: PendingOperation, why: No) -> Decision:
    replies = tuple((waiter, why) for waiter in operation.waiters)
    return Decision((pending.OperationEnded(operation.request),), replies=replies)


# ── answers ──


def describe_success(cluster: ClusterState, change: Change, operation: PendingOperation | None = None) -> Done:
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
    spec = change.change
    before = {name: change.before[name] for name in spec.values if name in change.before}
    reverted = cluster.ledger.changes.get(change.reverts) if spec.values else None
    return Done(
        text=text,
        change=spec.id,
        step=spec.step,
        before=before,
        values=spec.values,
        over=spec.over,
        overwrites=cluster.ledger.overwritten_by_revert(reverted, spec.number) if reverted else (),
    )
