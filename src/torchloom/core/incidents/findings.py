"""From findings to incidents: one for each condition, closed when it is over, and what the policy says about it."""

from __future__ import annotations

from collections.abc import Iterable

from torchloom.core.decision import NOTHING, Decision, close_incident, merge_decisions, provisional
from torchloom.core.detect.detector import Finding
from torchloom.core.detect.incident_kinds import KINDS
from torchloom.core.incidents.policy import planned, rule_for
from torchloom.core.incidents.responses import Trouble, respond
from torchloom.core.state.cluster import ClusterState
from torchloom.core.state.runs import RunPhase
from torchloom.protocol.ids import RankId
from torchloom.protocol.phrase import Phrase, phrase
from torchloom.protocol.records import About, IncidentAmended, IncidentOpened

REPORT_ONLY = phrase("not_our_job")


def handle_findings(cluster: ClusterState, rank: RankId, findings: Iterable[Finding], now: float) -> Decision:
    """What the beats of a rank have shown."""
    return merge_decisions(_handle(cluster, rank, finding, now) for finding in findings)


def _handle(cluster: ClusterState, rank: RankId, finding: Finding, now: float) -> Decision:
    of_job = KINDS[finding.kind].scope == "job"
    about = About(job=rank.job, part=finding.kind) if of_job else About(rank=rank, part=finding.kind)
    incident = cluster.incidents.find_open(rank.job, about)
    if finding.over:
        return NOTHING if incident is None else Decision((close_incident(incident.id, finding.what),))
    reason = phrase("of_rank", rank=rank.rank, what=finding.what)
    if incident is None:
        return _open(cluster, rank, finding, about, reason, now)
    if not of_job or rank.rank in incident.culprits:
        return NOTHING
    # Another rank of the job has the same trouble.
    return Decision((IncidentAmended(id=incident.id, evidence=(reason,), culprits=(rank.rank,)),))


def _open(cluster: ClusterState, rank: RankId, finding: Finding, about: About, reason: Phrase, now: float) -> Decision:
    run = cluster.runs.of(rank.replica_id)
    rule = rule_for(run.task if run is not None else None, finding.kind)
    opened = IncidentOpened(
        id=provisional(finding.kind, rank),
        what=phrase("of_job", job=rank.job, text=reason),
        about=about,
        job=rank.job,
        culprits=(rank.rank,),
        evidence=finding.evidence,
        decision=planned(*rule.do) if run is not None or rule.do == ("report",) else REPORT_ONLY,
        kind=finding.kind,
    )
    if run is None or run.phase is not RunPhase.RUNNING:
        return Decision((opened,))
    trouble = Trouble(finding.kind, opened.id, reason, (rank.rank,), finding.step, finding.since)
    return Decision((opened,)) + respond(cluster, run, trouble, now)
