"""Several runs that are one job, in words: its replicas, and the lighthouse they need."""

from __future__ import annotations

from collections.abc import Sequence

from torchloom.core.state.runs import LIGHTHOUSE
from torchloom.protocol.views import IncidentView, RunView
from torchloom.views.job_runs import INTERRUPTED, OVER, exit_code, summary


def replicas(runs: Sequence[RunView]) -> list[RunView]:
    """In which ranks train; what was asked for by its own name, whatever it is."""
    return [run for run in runs if run.task.replica != LIGHTHOUSE] or list(runs)


def label(run: RunView) -> str:
    """What a replica is called beside others: `0`; nothing where there is one."""
    return "" if run.task.part_of is None else run.job.removeprefix(f"{run.task.part_of}:")


def are_over(runs: Sequence[RunView]) -> bool:
    return bool(runs) and all(run.phase in OVER for run in runs)


def group_code(runs: Sequence[RunView]) -> int:
    """As the job ended: well, if enough of its replicas did."""
    if len(runs) == 1:  # all of it, or the one that was asked for
        return exit_code(runs[0])
    there = replicas(runs)
    done = sum(run.phase == "done" for run in there)
    ft = there[0].task.torchft
    if done >= (ft.min_replicas if ft is not None else 1):
        return 0
    bad = [run for run in there if run.phase == "failed"]
    return exit_code(bad[0]) if bad else INTERRUPTED


def all_told(job: str, runs: Sequence[RunView], now: float, incidents: Sequence[IncidentView] = ()) -> str:
    if len(runs) == 1:
        return summary(runs[0], now, incidents)
    there = replicas(runs)
    ends = {phase: sum(run.phase == phase for run in there) for phase in ("done", "failed", "cancelled")}
    counts = ", ".join(f"{count} {phase}" for phase, count in ends.items() if count)
    took = max((run.notes[-1].ended or now) - run.submitted if run.notes else 0.0 for run in there)
    parts = [f"{job}: of {len(there)} replicas {counts}", f"step {max(run.step for run in there):,}", f"{took:.1f} s"]
    again = sum(max(0, len(run.notes) - 1) for run in there)
    if again:
        parts.append(f"{again} restart{'s' if again != 1 else ''}, while the others continued")
    reasons = [f"{label(run)}: {run.reason}" for run in there if run.phase == "failed"]
    return ", ".join(parts) + (f" ({'; '.join(reasons)})" if reasons else "")
