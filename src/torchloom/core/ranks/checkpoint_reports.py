"""Reports about checkpoints: one was written, could not be written, or training resumed from one.

The weaver neither writes nor reads checkpoints. It records what ranks report, and opens incidents for failures.
"""

from __future__ import annotations

from torchloom.core.decision import NOTHING, Decision
from torchloom.core.incident_ids import close_incident, provisional
from torchloom.core.state.cluster import ClusterState
from torchloom.core.state.incidents import Incident
from torchloom.protocol.ids import RankId
from torchloom.protocol.phrase import Prose, phrase
from torchloom.protocol.rank import Resumed, Saved, SaveFailed
from torchloom.protocol.records import (
    About,
    CheckpointFailed,
    CheckpointSaved,
    IncidentAmended,
    IncidentOpened,
    JobResumed,
    Record,
)

SHOWN = 20
"""Damaged checkpoints that the evidence names."""


def record_saved(cluster: ClusterState, rank_id: RankId, report: Saved) -> Decision:
    rank = cluster.ranks.find(rank_id, report.incarnation)
    if rank is None:
        return NOTHING
    record = CheckpointSaved.from_fields(report, rank=rank_id, node=rank.node)
    late = [i for i in cluster.incidents.open_of(rank_id.job) if i.kind == "overdue"]
    came = [close_incident(i.id, phrase("checkpoint_written", step=report.step)) for i in late]
    return Decision((record, *came, *_close(cluster, rank_id.job, phrase("later_checkpoint_written"))))


def record_failed(cluster: ClusterState, rank_id: RankId, report: SaveFailed) -> Decision:
    if cluster.ranks.find(rank_id, report.incarnation) is None:
        return NOTHING
    records: list[Record] = [CheckpointFailed.from_fields(report, rank=rank_id)]
    evidence = (report.why, phrase("at_step_in", step=report.step, folder=report.folder))
    incident = _find_incident(cluster, rank_id.job)
    if incident is None:
        records.append(
            IncidentOpened(
                id=provisional("checkpoint", rank_id.job),
                what=phrase("checkpoint_failed", job=rank_id.job),
                about=_about(rank_id.job),
                job=rank_id.job,
                evidence=evidence,
                errors=(report.error,),
                decision=phrase("next_interval_saves"),
                reason=phrase("last_good_stays"),
            )
        )
    elif report.error not in incident.errors:
        records.append(IncidentAmended(id=incident.id, evidence=evidence, errors=(report.error,)))
    return Decision(tuple(records))


def record_resumed(cluster: ClusterState, rank_id: RankId, report: Resumed) -> Decision:
    if cluster.ranks.find(rank_id, report.incarnation) is None:
        return NOTHING
    records: list[Record] = [JobResumed.from_fields(report, rank=rank_id)]
    if report.rejected:
        records += _report_damaged(cluster, rank_id.job, report)
    return Decision(tuple(records))


def close_forgotten(cluster: ClusterState, job: str) -> tuple[Record, ...]:
    """Close the incident about the checkpoints of a forgotten job: no later checkpoint will."""
    return _close(cluster, job, phrase("job_forgotten"))


def _about(job: str) -> About:
    return About(job=job, part="checkpoint")


def _find_incident(cluster: ClusterState, job: str) -> Incident | None:
    """The open incident about the checkpoints of a job; there is one at most."""
    return next((i for i in cluster.incidents.values() if i.closed is None and i.about == _about(job)), None)


def _close(cluster: ClusterState, job: str, outcome: Prose) -> tuple[Record, ...]:
    incident = _find_incident(cluster, job)
    return () if incident is None else (close_incident(incident.id, outcome),)


def _report_damaged(cluster: ClusterState, job: str, report: Resumed) -> list[Record]:
    """One incident, although every rank that searched reports the same."""
    names = tuple(report.rejected)
    shown = list(report.rejected.items())[:SHOWN]
    evidence = tuple(phrase("checkpoint_rejected", name=name, why=why[:500]) for name, why in shown)
    began = cluster.jobs[job].began
    if any(i.checkpoints == names and i.about == _about(job) and i.opened >= began for i in cluster.incidents.values()):
        return []
    incident = provisional("damaged", job)
    decision = phrase("resumed_from", step=report.step)
    opened = IncidentOpened(
        id=incident,
        what=phrase("checkpoint_damaged" if len(names) == 1 else "checkpoints_damaged", names=names, job=job),
        checkpoints=names,
        about=_about(job),
        job=job,
        evidence=evidence,
        decision=decision,
        reason=phrase("newest_whole"),
    )
    return [opened, close_incident(incident, decision)]
