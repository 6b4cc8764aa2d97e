"""The rows of a workload file with torchloader's columns, as typed values; every problem has its row and column.

docs/workloads.md explains the columns. Nothing here opens a file or evaluates a cell.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from msgspec.structs import replace

from torchloom.errors import BadInput
from torchloom.job.csv_lines import Line, split_lines
from torchloom.job.device_lists import node_name, parse_groups
from torchloom.job.workload import LONGEST, Problem, Row, Rows
from torchloom.protocol.job_spec import DeviceGroup
from torchloom.shared.suggestions import did_you_mean
from torchloom.workloads.architecture_catalog import DEPTHS, suggest_architecture, suggest_depth

MOST_LOADERS = 512
"""Of one rank."""
EXAMPLE = "arch,depth,batch,workers,output_folder,cuda_device,end_iter"


class _Bounds(NamedTuple):
    least: int
    most: int
    default: int | None = None
    """Of an empty cell, and of a file without the column; None: there must be a value."""


_WHOLE = {
    "depth": _Bounds(0, 10_000),
    "batch": _Bounds(1, 10**9),
    "workers": _Bounds(0, 10**6),
    "port": _Bounds(0, 65_535, 0),
    "start_iter": _Bounds(0, 10**12, 0),
    "start_epoch": _Bounds(0, 10**9, 1),
    "end_iter": _Bounds(1, 10**12),
    "end_epoch": _Bounds(0, 10**9, 1),
    "node_size": _Bounds(1, 1000, 0),
    "world_size": _Bounds(1, 10**6, 0),
}
_SECONDS = ("arrival_time", "submit_interval")
_TEXTS = ("arch", "output_folder", "master", "cuda_device")
COLUMNS = (
    "arch", "depth", "batch", "workers", "output_folder", "master", "port", "arrival_time", "cuda_device",
    "start_iter", "start_epoch", "end_iter", "end_epoch", "node_size", "world_size", "submit_interval",
)  # fmt: skip
REQUIRED = (
    "arch", "output_folder", "cuda_device", *(name for name, bounds in _WHOLE.items() if bounds.default is None)
)  # fmt: skip


def read_rows(text: str, overrides: Mapping[str, str] | None = None) -> Rows:
    """The rows of a file. A column in `overrides` has that value in all rows, whatever the file says."""
    overrides = overrides or {}
    lines = list(split_lines(text))
    if not lines:
        return Rows(problems=(Problem(1, "", "the file has no row", f"the first row is {EXAMPLE},…"),))
    head, *body = lines
    names = tuple(cell.strip().lower() for cell in head.cells)
    names = names[:-1] if names and not names[-1] else names
    if problems := [*_head_problems(head, names, overrides), *_unknown_overrides(overrides)]:
        return Rows(problems=tuple(problems))
    if not body:
        return Rows(problems=(Problem(head.row, "", "there are no jobs", "add a row for each job"),))
    reader = _Reader()
    for line in body:
        reader.read(line, names, overrides)
    return Rows(tuple(reader.rows), tuple(reader.problems), tuple(reader.warnings))


def _head_problems(head: Line, names: Sequence[str], overrides: Mapping[str, str]) -> list[Problem]:
    if head.error:
        return [Problem(head.row, "", head.error, f"the first row has the names of the columns: {EXAMPLE},…")]
    if not set(names).intersection(COLUMNS):
        return [Problem(head.row, "", "it has no names of columns", f"the first row is {EXAMPLE},…")]
    problems = [
        Problem(head.row, name[:40] or f"column {place}", "there is no such column", did_you_mean(name, COLUMNS))
        for place, name in enumerate(names, start=1)
        if name not in COLUMNS
    ]
    twice = sorted({name for name in names if name in COLUMNS and names.count(name) > 1})
    problems += [Problem(head.row, name, "the column stands there twice", "leave one out") for name in twice]
    missing = [name for name in REQUIRED if name not in names and name not in overrides]
    return problems + [
        Problem(head.row, name, "the column is missing", f"add it, or --set {name}=…") for name in missing
    ]


def _unknown_overrides(overrides: Mapping[str, str]) -> list[Problem]:
    unknown = [name for name in overrides if name not in COLUMNS]
    return [Problem(0, name, "--set names no column", did_you_mean(name, COLUMNS)) for name in unknown]


class _Reader:
    """Reads rows one by one and gathers what is wrong with them."""

    def __init__(self) -> None:
        self.rows: list[Row] = []
        self.problems: list[Problem] = []
        self.warnings: list[Problem] = []
        self._row = 0
        self._arrival = 0.0
        """Of the row before."""
        self._before = 0
        """The row before, also if it is wrong; 0 for the first."""

    def read(self, line: Line, names: Sequence[str], overrides: Mapping[str, str]) -> None:
        self._row = line.row
        before = len(self.problems)
        cells = line.cells
        while len(cells) > len(names) and not cells[-1]:
            cells = cells[:-1]
        if line.error:
            self._problem("", line.error, "write quotes and brackets in pairs")
        elif len(cells) != len(names):
            counts = f"{len(cells)} cells, and there are {len(names)} columns"
            self._problem("", counts, "leave no cell out; quote a text that has a comma")
        else:
            values = {**dict(zip(names, cells, strict=True)), **overrides}
            row = self._row_of(values)
            self._arrival = row.arrival if row is not None else self._arrival
            if row is not None and len(self.problems) == before:
                self.rows.append(row)
        self._before = line.row

    def _row_of(self, values: Mapping[str, str]) -> Row | None:
        whole = {name: self._whole(name, values.get(name, "")) for name in _WHOLE}
        seconds = {name: self._seconds(name, values.get(name, "")) for name in _SECONDS}
        groups = self._groups(values["cuda_device"], values.get("master", ""))
        arch, depth = values["arch"], whole["depth"]
        self._check_architecture(arch, depth)
        folder = self._folder(values["output_folder"])
        if any(value is None for value in whole.values()) or groups is None or folder is None:
            return None
        numbers = {name: value or 0 for name, value in whole.items()}
        arrival, follows = self._arrives(seconds["arrival_time"], seconds["submit_interval"])
        own = {name: value for name, value in numbers.items() if name in Row.__struct_fields__}
        row = Row(
            row=self._row, arch=arch, output_folder=folder, groups=groups, master=values.get("master", ""),
            arrival=arrival, follows=follows, **own,
        )  # fmt: skip
        self._check_sizes(row, numbers["node_size"], numbers["world_size"])
        return row

    # ── cells ──

    def _whole(self, name: str, text: str) -> int | None:
        bounds = _WHOLE[name]
        if not text and bounds.default is not None:
            return bounds.default
        digits = text.removeprefix("-").removesuffix(".0")  # as spreadsheets and pandas write whole numbers
        remedy = f"a whole number from {bounds.least:,} to {bounds.most:,}"
        if not (digits.isascii() and digits.isdecimal()):
            self._problem(name, f"{_shown(text)} is not a whole number" if text else "it is empty", remedy)
            return None
        number = int(digits[:30]) * (-1 if text.startswith("-") else 1)
        if not bounds.least <= number <= bounds.most:
            self._problem(name, f"{_shown(text)} is out of bounds", remedy)
            return None
        return number

    def _seconds(self, name: str, text: str) -> float | None:
        """None for an empty cell, or after a problem."""
        if not text:
            return None
        try:
            number = float(text) if text.isascii() and "_" not in text else math.nan
        except ValueError:
            number = math.nan
        remedy = f"a number of seconds from 0 to {LONGEST:,.0f}"
        if math.isnan(number):
            self._problem(name, f"{_shown(text)} is not a number", remedy)
        elif number > LONGEST:
            self._problem(name, f"{_shown(text)}: the job would never arrive", remedy)
        elif number < 0:
            self._problem(name, f"{_shown(text)} is before the start", remedy)
        else:
            return number
        return None

    def _arrives(self, arrival: float | None, interval: float | None) -> tuple[float, int]:
        """When the row arrives, and which row it waits for."""
        if interval is None:
            return arrival or 0.0, 0
        if arrival:
            self._warning("arrival_time", "it is not used: submit_interval says when the row arrives")
        if not self._before:
            return 0.0, 0
        return min(self._arrival + interval, LONGEST), self._before

    def _groups(self, text: str, master: str) -> tuple[DeviceGroup, ...] | None:
        """In the order of ranks: that of the master comes first."""
        try:
            groups = parse_groups(text)
        except BadInput as error:
            self._problem("cuda_device", error.message, error.hint)
            return None
        if not master:
            return groups
        try:
            first = node_name(master)
        except BadInput as error:
            self._problem("master", error.message, error.hint)
            return None
        names = [group.node for group in groups]
        if not any(names):
            return (replace(groups[0], node=first), *groups[1:])
        if first in names:
            return tuple(sorted(groups, key=lambda group: group.node != first))
        named = ", ".join(name for name in names if name)
        self._problem("master", f"{_shown(master)} is not among the nodes of cuda_device", f"one of {named}, or empty")
        return None

    def _folder(self, text: str) -> str | None:
        folder = text.strip().strip("/")
        parts = folder.split("/")
        remedy = "a folder below trace/, such as test-48worker"
        if not folder:
            self._problem("output_folder", "it is empty", remedy)
        elif text.startswith("/") or ".." in parts or not folder.isprintable() or "\\" in folder:
            self._problem("output_folder", f"{_shown(text)} is not a folder below trace/", remedy)
        elif len(folder.encode()) > 1000 or any(len(part.encode()) > 200 for part in parts):
            self._problem("output_folder", "it is too long", "200 characters for each folder, 1,000 together")
        else:
            return folder
        return None

    # ── what cells say together ──

    def _check_architecture(self, arch: str, depth: int | None) -> None:
        if arch not in DEPTHS:
            self._problem("arch", f"there is no architecture {_shown(arch)}", suggest_architecture(arch[:100]))
        elif depth is not None and depth not in DEPTHS[arch]:
            self._problem("depth", f"{arch} has no depth {depth}", suggest_depth(arch))

    def _check_sizes(self, row: Row, node_size: int, world_size: int) -> None:
        groups, ranks = len(row.groups), row.ranks
        if node_size and node_size != groups:
            self._problem("node_size", f"{node_size}, and cuda_device has devices of {groups}", f"write {groups}")
        if world_size and world_size not in {groups, ranks}:  # torch has used the name for both
            what = f"{world_size}, and cuda_device has {groups} groups with {ranks} devices"
            self._problem("world_size", what, f"write {groups}")
        if row.batch < ranks:
            self._problem("batch", f"{row.batch} samples for {ranks} devices", f"{ranks} or more: one for each")
        if row.workers > MOST_LOADERS * ranks:
            self._problem("workers", f"{row.workers:,} for {ranks} devices", f"at most {MOST_LOADERS} for each")
        if row.start_iter >= row.end_iter:
            what = f"{row.start_iter:,} is not below end_iter, {row.end_iter:,}"
            self._problem("start_iter", what, "an epoch has end_iter iterations: begin before its last one")
        if row.end_epoch < row.start_epoch:
            what = f"{row.end_epoch:,} is before start_epoch, {row.start_epoch:,}"
            self._problem("end_epoch", what, f"{row.start_epoch:,} or more")
        for name, total in (("batch", row.batch), ("workers", row.workers)):
            if more := total % ranks:
                shares = f"{total // ranks + 1} for the first {more}, {total // ranks} for the others"
                self._warning(name, f"{total} is not a multiple of {ranks} devices: {shares}")

    def _problem(self, column: str, text: str, remedy: str) -> None:
        self.problems.append(Problem(self._row, column, text, remedy))

    def _warning(self, column: str, text: str, remedy: str = "") -> None:
        self.warnings.append(Problem(self._row, column, text, remedy))


def _shown(text: str) -> str:
    return repr(text if len(text) <= 40 else f"{text[:40]}…")
