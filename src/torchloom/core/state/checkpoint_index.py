"""What is known of each job's checkpoints: where they are, the latest, the last failure. The durable part.

It is about disks, not about runs: a new run of a job finds what the last one left, and only a forgotten job drops it.
"""

from __future__ import annotations

import msgspec
from msgspec.structs import replace

from torchloom.protocol.records import CheckpointFailed, CheckpointSaved, JobResumed, Record
from torchloom.protocol.views import FailedStep, ResumedStep, SavedStep

KEEP_SAVED = 50
"""Written checkpoints of one job before the oldest is forgotten."""


class CheckpointEntry(msgspec.Struct, frozen=True, kw_only=True):
    """The checkpoints of one job."""

    job: str
    folder: str = ""
    node: str = ""
    saved: tuple[SavedStep, ...] = ()
    """In the order in which they were told of."""
    failures: int = 0
    failed: FailedStep | None = None
    resumed: ResumedStep | None = None


class CheckpointIndexState(msgspec.Struct, frozen=True, kw_only=True):
    """As a value, for the snapshot."""

    jobs: tuple[CheckpointEntry, ...] = ()


class CheckpointIndex:
    def __init__(self, state: CheckpointIndexState | None = None) -> None:
        self.jobs = {kept.job: kept for kept in (state or CheckpointIndexState()).jobs}

    def state(self) -> CheckpointIndexState:
        return CheckpointIndexState(jobs=tuple(self.jobs[job] for job in sorted(self.jobs)))

    def of(self, job: str) -> CheckpointEntry:
        """What is known of this job, which may be nothing."""
        return self.jobs.get(job) or CheckpointEntry(job=job)

    def forget(self, job: str) -> None:
        self.jobs.pop(job, None)

    def fold(self, record: Record, at: float) -> None:
        match record:
            case CheckpointSaved(rank=rank):
                self.jobs[rank.job] = _with(self.of(rank.job), record, at)
            case CheckpointFailed(rank=rank, step=step, folder=folder, why=why):
                kept = self.of(rank.job)
                failed = FailedStep(step=step, why=why, at=at)
                self.jobs[rank.job] = replace(
                    kept, folder=kept.folder or folder, failures=kept.failures + 1, failed=failed
                )
            case JobResumed(rank=rank, step=step, path=path):
                self.jobs[rank.job] = replace(self.of(rank.job), resumed=ResumedStep(step=step, path=path, at=at))


def _with(kept: CheckpointEntry, record: CheckpointSaved, at: float) -> CheckpointEntry:
    """One more. A step that is written again, after a rollback, stands in the place of what it overwrote."""
    new = SavedStep(
        step=record.step,
        folder=record.folder,
        node=record.node,
        size=record.size,
        seconds=record.seconds,
        stall=record.stall,
        at=at,
    )
    others = tuple(old for old in kept.saved if (old.folder, old.step) != (new.folder, new.step))
    return replace(kept, folder=record.folder, node=record.node, saved=(*others, new)[-KEEP_SAVED:])
