"""The traces in a folder, read back from their CSV files: what a picture of them needs."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from torchloom.traces.trace_files import read_rows
from torchloom.traces.trace_rows import FILES

DEPTH = 3
"""Folders between the one that is drawn and a job."""
_RUN = re.compile(r"run-(\d+)")


class Mark(NamedTuple):
    """A moment of a job."""

    at: float
    event: str
    text: str


class Still(NamedTuple):
    """A time in which training stood still, or that a resize cost."""

    began: float
    seconds: float
    cause: str
    text: str


@dataclass
class JobCurves:
    job: str
    throughput: list[tuple[float, float | None]] = field(default_factory=list)
    unit: str = "samples/s"
    loaders: list[tuple[float, float]] = field(default_factory=list)
    """Of all ranks; each until the next."""
    marks: list[Mark] = field(default_factory=list)
    stills: list[Still] = field(default_factory=list)
    step: int = 0
    outcome: str = ""
    """Empty: it has not ended, as far as the trace knows."""
    began: float = 0.0
    ended: float = 0.0
    """Of its trace, where it has not ended."""

    def first(self, event: str) -> float | None:
        return next((mark.at for mark in self.marks if mark.event == event), None)

    @property
    def mean(self) -> float | None:
        """Throughput from the first to the last measurement."""
        values = [(at, value) for at, value in self.throughput if value is not None]
        if len(values) < 2:
            return values[0][1] if values else None
        return sum(value * (at - before) for (before, _), (at, value) in pairwise(values)) / (
            values[-1][0] - values[0][0]
        )


def find_traces(folder: Path) -> list[Path]:
    """Folders with a trace, in and below this one. Of several runs of a job the latest, unless a run is named."""
    latest: dict[Path, tuple[int, Path]] = {}
    for candidate in _folders(folder, DEPTH):
        if not any((candidate / name).is_file() for name in FILES):
            continue
        match = _RUN.fullmatch(candidate.name)
        base, number = (candidate.parent, int(match[1])) if match and candidate != folder else (candidate, 1)
        if number > latest.get(base, (0, base))[0]:
            latest[base] = number, candidate
    return [path for _, path in sorted(latest.values(), key=lambda each: each[1])]


def _folders(folder: Path, depth: int) -> Iterator[Path]:
    yield folder
    if depth:
        for below in sorted(folder.iterdir()):
            if below.is_dir() and not below.is_symlink() and below.name != "checkpoints":
                yield from _folders(below, depth - 1)


def read_curves(folder: Path) -> JobCurves | None:
    """None if the files have no row that can be read."""
    curves = JobCurves("")
    _read_throughput(curves, folder / "throughput.csv")
    _read_loaders(curves, folder / "loaders.csv")
    _read_marks(curves, folder / "events.csv")
    for row in read_rows(folder / "pauses.csv"):
        began, seconds = _number(row, "time"), _number(row, "seconds")
        if began is not None:
            curves.stills.append(Still(began, seconds or 0.0, row["cause"], _still_text(row, seconds)))
        curves.job = curves.job or row["job"]
    moments = [
        *(at for at, _ in curves.throughput),
        *(at for at, _ in curves.loaders),
        *(mark.at for mark in curves.marks),
    ]
    if not moments:
        return None
    curves.began, curves.ended = min(moments), max(moments)
    curves.marks.sort(key=lambda mark: mark.at)
    return curves


def _read_throughput(curves: JobCurves, file: Path) -> None:
    rows = [(at, row) for row in read_rows(file) if (at := _number(row, "time")) is not None]
    by_samples = any(row["samples_per_second"] for _, row in rows)
    before = None
    for at, row in rows:
        curves.job = row["job"]
        curves.step = max(curves.step, int(_number(row, "step") or 0))
        if by_samples:
            value = _number(row, "samples_per_second")
        else:
            steps = _number(row, "steps")
            value = None if steps is None or before is None or at <= before else steps / (at - before)
        curves.throughput.append((at, value))
        before = at
    curves.unit = "samples/s" if by_samples or not rows else "steps/s"


def _read_loaders(curves: JobCurves, file: Path) -> None:
    for row in read_rows(file):
        at, loaders, ranks = _number(row, "time"), _number(row, "loaders"), _number(row, "ranks")
        curves.job = curves.job or row["job"]
        if at is not None and loaders is not None and ranks is not None:
            curves.loaders.append((at, loaders * ranks))


def _read_marks(curves: JobCurves, file: Path) -> None:
    for row in read_rows(file):
        at = _number(row, "time")
        if at is None:
            continue
        curves.job = curves.job or row["job"]
        moves = f"{row['before']} → {row['after']} " if row["after"] else ""
        step = f", step {row['step']}" if row["step"] else ""
        curves.marks.append(Mark(at, row["event"], f"{row['event']}: {moves}{row['detail']}{step}"))
        if row["event"] == "ended":
            curves.outcome = row["detail"].partition(":")[0] or "ended"


def _still_text(row: Mapping[str, str], seconds: float | None) -> str:
    took = "not measured" if seconds is None else f"{seconds:.3g} s"
    moves = f" {row['before']} → {row['after']}" if row["after"] else ""
    return f"{row['cause']}{moves}: {took}" + (f" ({row['detail']})" if row["detail"] else "")


def _number(row: Mapping[str, str], name: str) -> float | None:
    try:
        return float(row[name])
    except (KeyError, ValueError):
        return None
