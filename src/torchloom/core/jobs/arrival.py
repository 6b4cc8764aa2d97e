"""When a job arrives: a while after it was submitted, and when the job that it follows is over.

The delay counts from the time of the submission in the log, so that a restart of the weaver does not begin it again.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from torchloom.core.decision import NOTHING, Decision
from torchloom.core.state.cluster import ClusterState
from torchloom.core.state.rank_states import JobPhase
from torchloom.core.state.run_states import Run
from torchloom.protocol.job_spec import Task
from torchloom.protocol.phrase import Prose, phrase
from torchloom.protocol.run_records import RunArrived


def arrive(cluster: ClusterState, run: Run, now: float) -> Decision:
    """A run that was submitted arrives as soon as nothing speaks against it."""
    return NOTHING if explain_arrival(cluster, run, now) else Decision((RunArrived(job=run.name),))


def explain_arrival(cluster: ClusterState, run: Run, now: float) -> Prose:
    """Why a run has not arrived, if it has not."""
    left = run.submitted + run.task.delay - now
    if left > 0:
        return phrase("arrives_in", seconds=math.ceil(left))
    if run.task.after is not None and not _is_over(cluster, run.task.after, run.submitted):
        return phrase("waits_for_job", job=run.task.after)
    return ""


def _is_over(cluster: ClusterState, job: str, since: float) -> bool:
    """Whether a job that began before this time has ended. A later one of its name is another job."""
    view = cluster.jobs.get(job)
    return view is None or view.phase is not JobPhase.RUNNING or view.began > since


def jobs_before(cluster: ClusterState, task: Task) -> Iterator[str]:
    """The jobs that must have ended before a task starts, the nearest first."""
    names = set[str]()
    while task.after is not None and task.after not in names:  # an earlier job of a name may have followed a later one
        names.add(task.after)
        yield task.after
        runs = cluster.runs.named(task.after)
        if not runs:
            return
        task = runs[0].task
