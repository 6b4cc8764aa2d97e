"""From findings to incidents: one for each condition, closed when it is over, and what the policy says about it."""

from __future__ import annotations

from collections.abc import Iterable

from torchloom.core.decision import NOTHING, Decision, merge_decisions
from torchloom.core.detect.detector import Finding
from torchloom.core.detect.incident_kinds import KINDS
from torchloom.core.incident_ids import provisional
from torchloom.core.incidents.policy import planned, rule_for
from torchloom.core.incidents.responses import Trouble, respond
from torchloom.core.state.cluster import ClusterState
from torchloom.core.state.incidents import Incident
from torchloom.core.state.runs import RunPhase
from torchloom.protocol.ids import RankId
from torchloom.protocol.phrase import phrase
from torchloom.protocol.records import About, IncidentAmended, IncidentOpened

REPORT_ONLY = phrase("not_our_job")


def handle_findings(cluster: ClusterState, rank: RankId, findings: Iterable[Finding], now: float) -> Decision:
    """What the beats of a rank have shown."""
    return merge_decisions(
        _over(cluster, rank, finding) if finding.over else _began(cluster, rank, finding, now) for finding in findings
    )


def _began(cluster: ClusterState, rank: RankId, finding: Finding, now: float) -> Decision:
    incident = cluster.incidents.find_open(rank.job, _about(rank, finding))
    if incident is not None:
        return _also(incident, rank, finding)
    run = cluster.runs.of(rank.replica_id)
    rule = rule_for(run.task if run is not None else None, finding.kind)
    asked = rule.do != ("report",)
    reason = phrase("of_rank", rank=rank.rank, what=finding.what)
    opened = IncidentOpened(
        id=provisional(finding.kind, rank),
        what=phrase("of_job", job=rank.job, text=reason),
        about=_about(rank, finding),
        job=rank.job,
        culprits=(rank.rank,),
        evidence=finding.evidence,
        decision=planned(*rule.do) if run is not None or not asked else REPORT_ONLY,
        kind=finding.kind,
    )
    decision = Decision((opened,))
    if run is None or run.phase is not RunPhase.RUNNING:
        return decision
    trouble = Trouble(finding.kind, opened.id, reason, (rank.rank,), finding.step, finding.since)
    return merge_decisions([decision, respond(cluster, run, trouble, now)])


def _over(cluster: ClusterState, rank: RankId, finding: Finding) -> Decision:
    incident = cluster.incidents.find_open(rank.job, _about(rank, finding))
    if incident is None:
        return NOTHING
    return Decision((IncidentAmended(id=incident.id, outcome=finding.what, closed=True),))


def _also(incident: Incident, rank: RankId, finding: Finding) -> Decision:
    """Another rank of the job has the same trouble."""
    if KINDS[finding.kind].scope != "job" or rank.rank in incident.culprits:
        return NOTHING
    evidence = phrase("of_rank", rank=rank.rank, what=finding.what)
    return Decision((IncidentAmended(id=incident.id, evidence=(evidence,), culprits=(rank.rank,)),))


def _about(rank: RankId, finding: Finding) -> About:
    if KINDS[finding.kind].scope == "job":
        return About(job=rank.job, part=finding.kind)
    return About(rank=rank, part=finding.kind)
