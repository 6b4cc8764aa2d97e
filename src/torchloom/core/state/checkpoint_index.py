"""The checkpoints of each job: where they are, the latest, the last failure. The durable part.

It is about disks, not about runs: a new run of a job finds what the last one left, and only a forgotten job drops it.
"""

from __future__ import annotations

from msgspec.structs import replace

from torchloom.protocol.rank import CheckpointFailed, CheckpointSaved, JobResumed
from torchloom.protocol.views import CheckpointsView, FailedStep, ResumedStep, SavedStep

KEEP_SAVED = 50
"""Written checkpoints of one job before the oldest is forgotten."""


class CheckpointIndex(dict[str, CheckpointsView]):
    """By job."""

    def of(self, job: str) -> CheckpointsView:
        """What is recorded about this job, which may be nothing."""
        return self.get(job) or CheckpointsView(job=job)

    def fold(self, record: CheckpointSaved | CheckpointFailed | JobResumed, at: float) -> None:
        view = self.of(record.rank.job)
        match record:
            case CheckpointSaved(folder=folder, node=node, step=step):
                # A step that is written again, after a rollback, replaces the checkpoint that it overwrote.
                others = tuple(old for old in view.saved if (old.folder, old.step) != (folder, step))
                saved = (*others, SavedStep.from_fields(record, at=at))[-KEEP_SAVED:]
                view = replace(view, folder=folder, node=node, saved=saved)
            case CheckpointFailed(folder=folder):
                failed = FailedStep.from_fields(record, at=at)
                view = replace(view, folder=view.folder or folder, failures=view.failures + 1, failed=failed)
            case JobResumed():
                view = replace(view, resumed=ResumedStep.from_fields(record, at=at))
        self[view.job] = view
