"""What a rollback needs to be done by an agent: before which step, where, and whether there must be something."""

from __future__ import annotations

from torchloom.core.state.cluster import ClusterState
from torchloom.core.state.runs import Run
from torchloom.protocol.job import Rule
from torchloom.protocol.node import Rollback


def rollback(cluster: ClusterState, run: Run, rule: Rule, steps: tuple[int, int], incident: str) -> Rollback:
    """Back to before the first of the steps that may have gone wrong; it is known which was the last."""
    first, last = steps
    kept = cluster.checkpoints.of(run.replica_id.job)
    saved = [save.step for save in kept.saved if save.at >= run.submitted]
    resumed = [note.resume_step for note in run.notes if note.resume_step is not None]
    return Rollback(
        before=first,
        back=rule.back,
        skip=(first, last) if rule.skip else None,
        incident=incident,
        folder=kept.folder,
        saved=any(known < first for known in (*saved, *resumed)),
    )
