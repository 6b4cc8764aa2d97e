"""The CSV files of a trace on disk: which folder a run of a job gets, rows appended whole, and rows read again.

A file is opened for each append: a folder that was deleted is made again, and many jobs need few open files. An append
that fails, as on a full disk, leaves no part of a row: the file is cut back, and the rows wait in memory for the next
append. A row that was cut off by a kill is removed before the next one is appended.
"""

from __future__ import annotations

import contextlib
import csv
import io
import os
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from torchloom.shared.files import open_locked
from torchloom.traces.trace_rows import FILE_OF, FILES, EventRow, LoadersRow, PauseRow, Row

RUN_FOLDER = "run-{}"
MOST_RUNS = 10_000
MOST_WAITING = 5_000
"""Rows that wait in memory while they cannot be written."""
LOCK = ".writer"
SAME_SECONDS = 0.01
"""Two submissions of a job are never so close."""
_TAIL = 64 * 1024
_MB = 1024 * 1024
_UNPRINTABLE = re.compile(r"[\x00-\x1f\x7f\x85\u2028\u2029]+")


def claim_folder(base: Path, job: str, submitted: float) -> Path:
    """The folder for the trace of this run of a job: `base` if that has no trace or the one of this run, otherwise
    `base/run-2`, `base/run-3` … Nothing that an earlier run has left is changed."""
    for number in range(1, MOST_RUNS):
        folder = base if number == 1 else base / RUN_FOLDER.format(number)
        files = [folder / name for name in FILES if (folder / name).exists()]
        if not files or any(_is_of_run(file, job, submitted) for file in files):
            return folder
    raise OSError(f"{base} has {MOST_RUNS:,} traces")


def _is_of_run(file: Path, job: str, submitted: float) -> bool:
    first = next(read_rows(file), None)
    if first is None or first.get("job") != job:
        return False
    try:
        return abs(float(first["time"]) - float(first["elapsed"]) - submitted) < SAME_SECONDS
    except (KeyError, ValueError):
        return False


def read_rows(file: Path) -> Iterator[dict[str, str]]:
    """The whole rows of a file, by column; none if it is not there, or is not a file of a trace."""
    try:
        with file.open(encoding="utf-8", errors="replace", newline="") as lines:
            yield from _whole_rows(lines, FILES[file.name].header)
    except OSError:
        return


def _whole_rows(lines: Iterable[str], header: Sequence[str]) -> Iterator[dict[str, str]]:
    rows = csv.reader(line for line in lines if line.endswith("\n"))
    try:
        if next(rows, None) != list(header):
            return
        for row in rows:
            if len(row) == len(header):
                yield dict(zip(header, row, strict=True))
    except csv.Error:
        return


class TraceWriter:
    """Writes the trace of a run of a job. Never raises OSError: it warns once, and again when rows are lost."""

    def __init__(self, folder: Path, warn: Callable[[str], None]) -> None:
        self.folder = folder
        self._warn = warn
        self._waiting: dict[str, deque[Row]] = {}
        self._written: dict[type, set[tuple[str, ...]]] = {kind: set() for kind in _KEYS}
        """What tells the rows of a file apart, where the log is read again after a restart."""
        self._last_loaders: tuple[float, tuple[str, ...]] = (0.0, ())
        """The time of the last row of that file, and what it says."""
        self._full: set[str] = set()
        self._is_failing = False
        self._lock: int | None = None

    def open(self) -> bool:
        """Make the folder, and learn what is written already. False if another process writes there."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._lock = open_locked(self.folder / LOCK)
            if self._lock is None:
                return False
        except OSError as error:
            self._fail(error)  # it may work later
        for kind, key in _KEYS.items():
            self._written[kind] = {tuple(row[name] for name in key) for row in read_rows(self.folder / FILE_OF[kind])}
        for row in read_rows(self.folder / FILE_OF[LoadersRow]):
            self._last_loaders = _loaders_key(tuple(row.values())) or self._last_loaders
        return True

    def append(self, rows: Iterable[Row]) -> None:
        for row in rows:
            if not self._is_written(row):
                self._waiting.setdefault(FILE_OF[type(row)], deque(maxlen=MOST_WAITING)).append(row)
        for name in list(self._waiting):
            lines = [format_row(row) for row in self._waiting[name]]
            if self._write(name, lines):
                del self._waiting[name]

    def close(self) -> None:
        self.append(())
        if self._lock is not None:
            with contextlib.suppress(OSError):
                (self.folder / LOCK).unlink(missing_ok=True)
            os.close(self._lock)
            self._lock = None

    def _is_written(self, row: Row) -> bool:
        """Also notes that it is, from now on."""
        cells = format_cells(row)
        if isinstance(row, LoadersRow):
            (last, before), latest = self._last_loaders, (row.time, cells[3:-2])
            if row.time < last or latest[1] == before:
                return True
            self._last_loaders = latest
            return False
        key = _KEYS.get(type(row))
        if key is None:
            return False
        by_name = dict(zip(row._fields, cells, strict=True))
        mark = tuple(by_name[name] for name in key)
        is_written = mark in self._written[type(row)]
        self._written[type(row)].add(mark)
        return is_written

    def _write(self, name: str, lines: Sequence[str]) -> bool:
        if name in self._full:
            return True
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            is_full = append_lines(
                self.folder / name, format_line(FILES[name].header), lines, FILES[name].most_mb * _MB
            )
        except OSError as error:
            self._fail(error)
            return False
        if is_full:
            self._full.add(name)
            self._warn(f"{self.folder / name} has reached {FILES[name].most_mb} MB: no further rows are written to it")
        if self._is_failing:
            self._is_failing = False
            self._warn(f"the trace in {self.folder} is written again")
        return True

    def _fail(self, error: OSError) -> None:
        if not self._is_failing:
            self._warn(
                f"cannot write the trace in {self.folder}: {error.strerror or error}. Jobs are not affected. "
                f"The latest {MOST_WAITING:,} rows of each file wait in memory"
            )
        self._is_failing = True


_KEYS: dict[type, tuple[str, ...]] = {EventRow: ("seq", "part", "event"), PauseRow: ("cause", "time", "target")}


def _loaders_key(cells: Sequence[str]) -> tuple[float, tuple[str, ...]] | None:
    """Without the times, the job, and what was predicted and measured."""
    try:
        return float(cells[0]), tuple(cells[3:-2])
    except ValueError:
        return None


def append_lines(file: Path, header: str, lines: Sequence[str], most: int) -> bool:
    """Append whole lines, after the header if the file is new. If it fails, the file is as long as before.

    True if it may not grow by so much: the rest is left out.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
    descriptor = os.open(file, flags, 0o666)
    try:
        size = _cut_torn_line(descriptor)
        room = most - size
        data = b""
        for line in lines if size else (header, *lines):
            encoded = line.encode("utf-8", "replace")
            if len(data) + len(encoded) > room:
                _append(descriptor, data, size)
                return True
            data += encoded
        _append(descriptor, data, size)
        return False
    finally:
        os.close(descriptor)


def _append(descriptor: int, data: bytes, size: int) -> None:
    view = memoryview(data)
    try:
        while view:
            view = view[os.write(descriptor, view) :]
    except OSError:
        os.ftruncate(descriptor, size)
        raise


def _cut_torn_line(descriptor: int) -> int:
    """The size without a last line that has no end."""
    size = os.fstat(descriptor).st_size
    tail = os.pread(descriptor, min(size, _TAIL), max(0, size - _TAIL))
    torn = len(tail) - (tail.rfind(b"\n") + 1)
    if torn:
        os.ftruncate(descriptor, size - torn)
    return size - torn


# ── cells ──


def format_row(row: Row) -> str:
    return format_line(format_cells(row))


def format_cells(row: Row) -> tuple[str, ...]:
    return tuple(
        f"{value:.3f}" if name in {"time", "elapsed"} else _cell(value)
        for name, value in zip(row._fields, row, strict=True)
    )


def _cell(value: Any) -> str:
    match value:
        case None:
            return ""
        case bool():
            return str(int(value))
        case float():
            return f"{value:.6g}"
        case str():
            return _UNPRINTABLE.sub(" ", value)  # a row is one line
    return str(value)


def format_line(cells: Iterable[str]) -> str:
    line = io.StringIO()
    csv.writer(line, lineterminator="\n").writerow(cells)
    return line.getvalue()
