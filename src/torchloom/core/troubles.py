"""From findings to incidents: one for each condition, closed when it is over, and what the policy says about it."""

from __future__ import annotations

from collections.abc import Iterable

from torchloom.core.decision import NOTHING, Decision, together
from torchloom.core.detect.finding import Finding
from torchloom.core.fabric import Fabric
from torchloom.core.incidents import Incident
from torchloom.core.policy import rule_for, told
from torchloom.core.responding import Trouble, respond
from torchloom.core.runs import RunPhase
from torchloom.messages import IncidentAmended, IncidentOpened, RankId, Record

OF_THE_JOB = frozenset({"not_finite", "loss_spike", "gradient", "slowdown", "overdue"})
"""What all ranks of a job have in common: the first to tell of it is named, the others add to the evidence."""
REPORT_ONLY = "reported; torchLoom did not start this job, and does nothing to it"


def found(fabric: Fabric, rank: RankId, findings: Iterable[Finding], now: float, opened: int = 0) -> Decision:
    """What the beats of a rank have shown, where so many incidents are being opened for another reason."""
    decisions: list[Decision] = []
    for finding in findings:
        decision = _over(fabric, rank, finding) if finding.over else _began(fabric, rank, finding, opened, now)
        opened += decision.opened
        decisions.append(decision)
    return together(decisions)


def _began(fabric: Fabric, rank: RankId, finding: Finding, offset: int, now: float) -> Decision:
    known = _known(fabric, rank, finding)
    if known is not None:
        return _also(known, rank, finding)
    run = fabric.runs.of(rank.of)
    rule = rule_for(run.task if run is not None else None, finding.kind)
    asked = rule.do != ("report",)
    opened = IncidentOpened(
        id=fabric.incidents.next_id(offset),
        what=f"{rank.job}: rank {rank.rank}: {finding.what}",
        subject=_subject(rank, finding),
        job=rank.job,
        evidence=finding.evidence,
        decision=told(rule) if run is not None or not asked else REPORT_ONLY,
        kind=finding.kind,
    )
    decision = Decision((opened,), reason=opened.what)
    if run is None or run.phase is not RunPhase.RUNNING:
        return decision
    reason = f"rank {rank.rank}: {finding.what}"
    trouble = Trouble(finding.kind, opened.id, reason, (rank.rank,), finding.step, finding.since)
    return together([decision, respond(fabric, run, trouble, now)])


def _over(fabric: Fabric, rank: RankId, finding: Finding) -> Decision:
    known = _known(fabric, rank, finding)
    if known is None:
        return NOTHING
    return Decision((IncidentAmended(id=known.id, outcome=finding.what, closed=True),), reason=finding.what)


def _also(known: Incident, rank: RankId, finding: Finding) -> Decision:
    """Another rank of the job has the same trouble."""
    mark = f"rank {rank.rank}: "
    if finding.kind not in OF_THE_JOB or mark in known.what or any(e.startswith(mark) for e in known.evidence):
        return NOTHING
    record: Record = IncidentAmended(id=known.id, evidence=(mark + finding.what,))
    return Decision((record,), reason=f"{known.id}: also {mark}{finding.what}")


def _known(fabric: Fabric, rank: RankId, finding: Finding) -> Incident | None:
    subject = _subject(rank, finding)
    return next((i for i in fabric.incidents.open_of(rank.job) if i.subject == subject), None)


def _subject(rank: RankId, finding: Finding) -> str:
    return f"{rank.job}#{finding.kind}" if finding.kind in OF_THE_JOB else f"{rank}#{finding.kind}"
