"""A workload: jobs that arrive one after another, as rows of a file say it and as tasks to submit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from torchloom.errors import BadInput
from torchloom.protocol.job_spec import DeviceGroup, Task

LONGEST = 1e8
"""Seconds until a job arrives: three years."""


class Problem(NamedTuple):
    """What is wrong with a file, or what a user should know about it."""

    row: int
    """0: it is about no row."""
    column: str
    """Empty: it is about the whole row."""
    text: str
    remedy: str = ""

    def __str__(self) -> str:
        place = ", ".join(filter(None, (f"row {self.row}" if self.row else "", self.column)))
        return f"{place}: {self.text}" + (f" → {self.remedy}" if self.remedy else "")


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """A job, as a row describes it."""

    row: int
    arch: str
    depth: int
    batch: int
    """Samples of a step, of all ranks together."""
    workers: int
    """Loader processes of all ranks together."""
    output_folder: str
    groups: tuple[DeviceGroup, ...]
    master: str = ""
    """The node of rank 0, as written."""
    port: int = 0
    arrival: float = 0.0
    """Seconds after the start of the file."""
    follows: int = 0
    """The row that must have ended before; 0: none."""
    start_iter: int = 0
    start_epoch: int = 1
    end_iter: int
    end_epoch: int = 1

    @property
    def ranks(self) -> int:
        return sum(len(group.devices) for group in self.groups)

    @property
    def iterations(self) -> int:
        """Steps to train. An epoch has `end_iter` of them, and the first epoch begins after `start_iter`."""
        return (self.end_epoch - self.start_epoch + 1) * self.end_iter - self.start_iter

    @property
    def samples(self) -> int:
        return self.iterations * self.batch


class Rows(NamedTuple):
    rows: tuple[Row, ...] = ()
    """In the order of the file."""
    problems: tuple[Problem, ...] = ()
    warnings: tuple[Problem, ...] = ()


class PlannedJob(msgspec.Struct, frozen=True, kw_only=True):
    """A job of a workload, as it will be submitted."""

    job: str
    row: int
    """In the file; of TOML, the number of the table."""
    arrival: float
    """Seconds after the start, divided by the time scale."""
    master: str = ""
    """The node of rank 0, as written."""
    batch: int | None = None
    workers: int | None = None
    iterations: int | None = None
    """These are known of a row, not of a script of the user."""
    output_folder: str = ""
    task: Task

    @property
    def samples(self) -> int | None:
        return None if self.iterations is None or self.batch is None else self.iterations * self.batch


class Workload(msgspec.Struct, frozen=True, kw_only=True):
    jobs: tuple[PlannedJob, ...]
    """In the order in which they arrive."""
    warnings: tuple[Problem, ...] = ()


class BadWorkload(BadInput):
    """A file with problems; nothing of it may be submitted."""

    def __init__(self, file: str, problems: Sequence[Problem]) -> None:
        count = "1 problem" if len(problems) == 1 else f"{len(problems):,} problems"
        super().__init__(
            f"{file} has {count}, and nothing of it is submitted",
            hint=str(problems[0]) if len(problems) == 1 else "correct all of them; each is named with row and column",
        )
        self.file = file
        self.problems = tuple(problems)
