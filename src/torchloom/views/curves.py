"""A job's past in a few lines: step, loss and samples/s of each rank as small curves."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Sequence

from torchloom.protocol.views import CurvesView, MarkView, Point
from torchloom.views.format.numbers import ABSENT, clock, duration, number, sparkline
from torchloom.views.format.tables import Cell, Column, Screen, clean, cut, table

_WIDTH = 48


def curves(view: CurvesView, now: float, screen: Screen, marks: Sequence[MarkView] = ()) -> list[str]:
    """Under the curves of each rank a number stands where a mark was made; the list of marks follows."""
    lines: list[str] = []
    for rank, points in view.curves:
        lines += [screen.paint(cut(clean(_head(str(rank), points, now)), screen.width), "bold")]
        if points:
            lines += [f"  {line}" for line in _body(points, screen, marks)]
    hidden = view.total - len(view.curves)
    if hidden > 0:
        lines.append(screen.paint(f"… and {hidden:,} more ranks", "dim"))
    for ordinal, mark in enumerate(marks, 1):
        lines.append(cut(clean(f"{ordinal % 10}  {clock(mark.at, now)}  {mark.text}"), screen.width))
    return lines or ["no history yet: the first point comes some seconds after the first beat"]


def _head(rank: str, points: tuple[Point, ...], now: float) -> str:
    if not points:
        return f"{rank}: no history yet"
    spread = duration(points[-1].at - points[0].at)
    return f"{rank}: {len(points)} points over {spread}, to {clock(points[-1].at, now)}"


def _body(points: tuple[Point, ...], screen: Screen, marks: Sequence[MarkView]) -> list[str]:
    width = _WIDTH if screen.width is None else max(8, min(_WIDTH, screen.width - 40))
    rows = [
        _row("step", [p.step for p in points], width, digits=1),  # steps are whole
        _row("loss", [p.loss for p in points], width),
        _row("samples/s", [p.samples_per_second for p in points], width),
    ]
    if line := _mark_line(points, marks, min(width, len(points))):
        rows.append(("marks", line, "", ""))
    columns: list[Column[tuple[str, str, str, str]]] = [
        Column("", lambda row: row[0]),
        Column("CURVE", lambda row: row[1]),
        Column("FIRST", lambda row: Cell(row[2]), right=True),
        Column("LAST", lambda row: Cell(row[3]), right=True),
    ]
    return table(columns, rows, Screen(None, None, screen.colour))


def _row(name: str, values: Sequence[float | None], width: int, digits: int = 6) -> tuple[str, str, str, str]:
    """The name of a curve, the curve, its first and its last value."""
    numbers = [v for v in values if v is not None]
    if not numbers:
        return name, ABSENT, ABSENT, ABSENT
    return name, sparkline(values, width), number(numbers[0], digits), number(numbers[-1], digits)


def _mark_line(points: tuple[Point, ...], marks: Sequence[MarkView], width: int) -> str:
    """The last digit of each mark's number, above the point that was the newest when it was made."""
    line = [" "] * width
    for ordinal, mark in enumerate(marks, 1):
        index = bisect(points, mark.at, key=lambda point: point.at) - 1
        if index >= 0:
            line[((index + 1) * width - 1) // len(points)] = str(ordinal % 10)
    return "".join(line).rstrip()
