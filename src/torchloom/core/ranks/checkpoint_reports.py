"""Reports about checkpoints: one was written, could not be written, or training resumed from one.

The weaver neither writes nor reads checkpoints. It records what ranks report, and opens incidents for failures.
"""

from __future__ import annotations

from torchloom.core.decision import Decision, close_incident, provisional
from torchloom.core.state.cluster import ClusterState
from torchloom.core.state.rank_states import Rank
from torchloom.protocol.phrase import Prose, phrase
from torchloom.protocol.rank import CheckpointFailed, CheckpointSaved, JobResumed, Resumed, Saved, SaveFailed
from torchloom.protocol.records import About, IncidentAmended, IncidentOpened, Record

SHOWN = 20
"""Damaged checkpoints that the evidence names."""


def record_saved(cluster: ClusterState, rank: Rank, report: Saved) -> Decision:
    job = rank.id.job
    record = CheckpointSaved.from_fields(report, rank=rank.id, node=rank.node)
    late = [i for i in cluster.incidents.open_of(job) if i.kind == "overdue"]
    came = [close_incident(i.id, phrase("checkpoint_written", step=report.step)) for i in late]
    return Decision((record, *came, *close_failure(cluster, job, phrase("later_checkpoint_written"))))


def record_failed(cluster: ClusterState, rank: Rank, report: SaveFailed) -> Decision:
    job = rank.id.job
    failed = CheckpointFailed.from_fields(report, rank=rank.id)
    evidence = (report.why, phrase("at_step_in", step=report.step, folder=report.folder))
    incident = cluster.incidents.find_open(job, _about(job))
    if incident is not None:
        amended = IncidentAmended(id=incident.id, evidence=evidence, errors=(report.error,))
        return Decision((failed,) if report.error in incident.errors else (failed, amended))
    opened = IncidentOpened(
        id=provisional("checkpoint", job),
        what=phrase("checkpoint_failed", job=job),
        about=_about(job),
        job=job,
        evidence=evidence,
        errors=(report.error,),
        decision=phrase("next_interval_saves"),
        reason=phrase("last_good_stays"),
    )
    return Decision((failed, opened))


def record_resumed(cluster: ClusterState, rank: Rank, report: Resumed) -> Decision:
    damaged = _report_damaged(cluster, rank.id.job, report) if report.rejected else ()
    return Decision((JobResumed.from_fields(report, rank=rank.id), *damaged))


def _about(job: str) -> About:
    return About(job=job, part="checkpoint")


def close_failure(cluster: ClusterState, job: str, outcome: Prose) -> tuple[Record, ...]:
    """Close the incident about the checkpoints of a job; there is one at most."""
    incident = cluster.incidents.find_open(job, _about(job))
    return () if incident is None else (close_incident(incident.id, outcome),)


def _report_damaged(cluster: ClusterState, job: str, report: Resumed) -> tuple[Record, ...]:
    """One incident, although every rank that searched reports the same."""
    names = tuple(report.rejected)
    shown = list(report.rejected.items())[:SHOWN]
    evidence = tuple(phrase("checkpoint_rejected", name=name, why=why[:500]) for name, why in shown)
    began = cluster.jobs[job].began
    if any(i.checkpoints == names and i.about == _about(job) and i.opened >= began for i in cluster.incidents.values()):
        return ()
    decision = phrase("resumed_from", step=report.step)
    opened = IncidentOpened(
        id=provisional("damaged", job),
        what=phrase("checkpoints_damaged", names=names, job=job),
        checkpoints=names,
        about=_about(job),
        job=job,
        evidence=evidence,
        decision=decision,
        reason=phrase("newest_whole"),
    )
    return opened, close_incident(opened.id, decision)
