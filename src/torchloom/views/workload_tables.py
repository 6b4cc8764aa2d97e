"""A workload in words: its plan as a table, its arrivals on each device as a timeline, and how its jobs ended."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from torchloom.job.workload import PlannedJob, Problem
from torchloom.protocol.job_spec import Task
from torchloom.protocol.views import RunView
from torchloom.shared.division import share
from torchloom.views.format.numbers import delay, duration, number
from torchloom.views.format.tables import Column, Screen, table
from torchloom.views.job_runs import OVER
from torchloom.views.listings import state

ANYWHERE = "any node"
MOST_LANES = 64
"""Devices in a timeline; the rest is counted."""
_WIDEST, _NARROWEST = 60, 20
"""Columns of a timeline."""
_LABEL = 30
_ONE_EACH = 9
"""Jobs that a digit can count."""


class Finish(NamedTuple):
    """How a job of a workload went. Times are seconds after the start of the workload."""

    job: str
    phase: str
    arrival: float
    start: float | None = None
    finish: float | None = None
    samples: int | None = None
    samples_per_second: float | None = None
    """From the arrival to the finish, so with the time that the job waited."""


def plan(jobs: Sequence[PlannedJob], screen: Screen) -> list[str]:
    columns: list[Column[PlannedJob]] = [
        Column("ROW", lambda job: str(job.row), right=True),
        Column("JOB", lambda job: job.job, shrinks=True),
        Column("ARRIVES", _arrives, right=True),
        Column("DEVICES", lambda job: devices(job.task), shrinks=True),
        Column("PORT", lambda job: str(job.task.port) if job.task.port else "any", right=True),
    ]
    if any(job.batch is not None for job in jobs):
        columns += [
            Column("STEPS", lambda job: None if job.iterations is None else f"{job.iterations:,}", right=True),
            Column("BATCH", lambda job: _divided(job.batch, job), right=True),
            Column("LOADERS", lambda job: _divided(job.workers, job), right=True),
        ]
    else:
        columns.append(Column("COMMAND", lambda job: " ".join(job.task.argv), shrinks=True))
    if any(job.task.after for job in jobs):
        columns.insert(3, Column("AFTER", lambda job: job.task.after, shrinks=True))
    return table(columns, jobs, screen)


def _arrives(job: PlannedJob) -> str:
    return delay(job.arrival)


def devices(task: Task) -> str:
    """`n1: 0 1; any node: 0 1`; of a job that names none, its ranks."""
    if not task.groups:
        return f"{task.per_node} of {task.nodes} node{'s' if task.nodes != 1 else ''}"
    return "; ".join(f"{group.node or ANYWHERE}: {' '.join(map(str, group.devices))}" for group in task.groups)


def _divided(total: int | None, job: PlannedJob) -> str | None:
    """`512 = 4×128`, `17 = 1×5 + 3×4`."""
    if total is None:
        return None
    ranks = job.task.world_size
    counts = Counter(share(total, ranks, rank) for rank in range(ranks))
    return f"{total} = " + " + ".join(f"{count}×{part}" for part, count in sorted(counts.items(), reverse=True))


# ── the timeline ──


def timeline(jobs: Sequence[PlannedJob], screen: Screen) -> list[str]:
    """The number of jobs that arrive on each device in each part of the time; + for ten and more."""
    lanes = _lanes(jobs)
    if not lanes:
        return []
    shown = list(lanes)[:MOST_LANES]
    label = min(_LABEL, max(len(name) for name in (*shown, "ARRIVALS")))
    width = _WIDEST if screen.width is None else max(_NARROWEST, min(_WIDEST, screen.width - label - 2))
    last = max(job.arrival for job in jobs)
    end = duration(last)
    lines = [f"{'ARRIVALS':{label}}  0 s{end:>{width - 3}}"]
    for name in shown:
        counts = Counter(min(width - 1, int(arrival / last * width) if last else 0) for arrival in lanes[name])
        marks = (counts[place] for place in range(width))
        text = "".join("·" if not count else str(count) if count <= _ONE_EACH else "+" for count in marks)
        lines.append(f"{name[:label]:{label}}  {text}")
    if len(lanes) > len(shown):
        lines.append(f"and {len(lanes) - len(shown):,} more devices")
    return lines


def _lanes(jobs: Iterable[PlannedJob]) -> dict[str, list[float]]:
    """The arrivals on each device. A node that a job leaves open is named after the place of its group."""
    lanes: dict[tuple[bool, str, int], list[float]] = {}
    for job in jobs:
        for place, group in enumerate(job.task.groups):
            node = group.node or (ANYWHERE if len(job.task.groups) == 1 else f"{ANYWHERE} ({place + 1})")
            for device in sorted(set(group.devices)):
                lanes.setdefault((group.node is None, node, device), []).append(job.arrival)
    return {f"{node}/{device}": lanes[is_open, node, device] for is_open, node, device in sorted(lanes)}


# ── the end ──


def finish_of(job: PlannedJob, runs: Sequence[RunView], began: float) -> Finish:
    """How a job went, from its runs; `began` is when the workload was submitted."""
    notes = [note for run in runs for note in run.notes]
    starts = [note.running or note.began for note in notes]
    ends = [note.ended for note in notes if note.ended is not None]
    over = bool(runs) and all(run.phase in OVER for run in runs)
    step = max((run.step for run in runs), default=0)
    samples = None if job.batch is None else job.samples if _is_done(runs) else step * job.batch
    finish = max(ends) - began if over and ends else None
    took = 0.0 if finish is None else finish - job.arrival
    return Finish(
        job=job.job,
        phase=runs[0].phase if runs else "unknown",
        arrival=job.arrival,
        start=min(starts) - began if starts else None,
        finish=finish,
        samples=samples,
        samples_per_second=samples / took if samples is not None and took > 0 else None,
    )


def _is_done(runs: Sequence[RunView]) -> bool:
    return bool(runs) and all(run.phase == "done" for run in runs)


def finishes(rows: Sequence[Finish], screen: Screen) -> list[str]:
    columns: list[Column[Finish]] = [
        Column("JOB", lambda row: row.job, shrinks=True),
        Column("PHASE", lambda row: state(row.phase)),
        Column("ARRIVAL", lambda row: delay(row.arrival), right=True),
        Column("START", lambda row: None if row.start is None else duration(row.start), right=True),
        Column("FINISH", lambda row: None if row.finish is None else duration(row.finish), right=True),
        Column("SAMPLES", lambda row: None if row.samples is None else f"{row.samples:,}", right=True),
        Column("SAMPLES/S", lambda row: number(row.samples_per_second), right=True),
    ]
    lines = table(columns, rows, screen)
    rates = [row.samples_per_second for row in rows if row.samples_per_second is not None]
    ends = [row.finish for row in rows if row.finish is not None]
    if ends:
        lines.append(f"{_count(rows)}, the last after {duration(max(ends))}")
    if rates:
        lines[-1] += f", together {number(sum(rates))} samples/s from arrival to finish"
    return lines


def _count(rows: Sequence[Finish]) -> str:
    phases = Counter(row.phase for row in rows)
    return ", ".join(f"{count:,} {phase}" for phase, count in sorted(phases.items()))


def problems(listed: Iterable[Problem], kind: str = "") -> list[str]:
    """One line each; `kind` is put before it."""
    return [f"{kind}{problem}" for problem in listed]
