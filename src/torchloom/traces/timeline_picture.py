"""A picture of the traces in a folder, as SVG: for each job its throughput and its loaders, all on one time axis.

It is drawn from the CSV files alone, so it can be drawn again later. Colours follow the light or dark scheme of the
viewer, by a media query in the style sheet of the picture.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Sequence
from html import escape
from itertools import pairwise
from pathlib import Path
from statistics import median

from torchloom.traces.trace_curves import JobCurves, find_traces, read_curves
from torchloom.views.format.numbers import duration, number

PICTURE = "timeline.svg"
MOST_JOBS = 200
COLOURS = ("#2f7fd6", "#d9692b", "#2e9e6b", "#a565c9", "#c7952a", "#d6506e", "#3fa3ad", "#8a8f3c")
WIDTH, LEFT, RIGHT = 1180, 250, 24
PLOT = WIDTH - LEFT - RIGHT
TOP, BOTTOM = 78, 46
RATE_HEIGHT, LOADERS_HEIGHT, BETWEEN, BAND_GAP = 74, 40, 12, 30
TOTAL_HEIGHT = 84
BAND = RATE_HEIGHT + BETWEEN + LOADERS_HEIGHT + BAND_GAP
POINTS = 900
"""Most points of a line."""
GAP_SECONDS = 5.0
"""Without a row for this time, and for five usual intervals, a line is broken."""
NAME_LENGTH = 22
LEAST_WAIT = 4.0
"""Width of a wait that is drawn."""
STYLE = """
  text { font: 12px system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif; fill: #24292f; }
  .back { fill: #ffffff; } .panel { fill: #f6f8fa; } .grid { stroke: #d8dee4; } .axis { stroke: #8c959f; }
  .title { font-size: 17px; font-weight: 600; } .name { font-weight: 600; font-size: 13px; }
  .dim, .tick { fill: #57606a; } .tick { font-size: 11px; } .label { font-size: 10.5px; fill: #57606a; }
  .still { fill: #6e7781; fill-opacity: 0.22; } .mark { stroke: #24292f; fill: #24292f; }
  .resize { stroke: #24292f; stroke-dasharray: 2 2; stroke-opacity: 0.65; }
  .wait { stroke: #8c959f; stroke-dasharray: 2 4; }
  .failed { stroke: #cf222e; }
  @media (prefers-color-scheme: dark) {
    text { fill: #e6edf3; } .back { fill: #0d1117; } .panel { fill: #161b22; } .grid { stroke: #2b323b; }
    .axis { stroke: #6e7681; } .dim, .tick, .label { fill: #9da7b3; } .still { fill: #b1bac4; }
    .mark { stroke: #e6edf3; fill: #e6edf3; } .resize { stroke: #e6edf3; } .failed { stroke: #ff7b72; }
  }
"""


def draw_folder(folder: Path) -> Path | None:
    """Draw the traces in and below a folder into its picture; None if there are none."""
    if not folder.is_dir():
        return None
    curves = [each for path in find_traces(folder) if (each := read_curves(path)) is not None]
    if not curves:
        return None
    picture = folder / PICTURE
    beside = picture.with_name(f".{PICTURE}.{os.getpid()}")
    try:
        beside.write_text(draw(curves, "/".join(folder.absolute().parts[-2:])), encoding="utf-8")
        beside.replace(picture)
    finally:
        beside.unlink(missing_ok=True)
    return picture


def draw(curves: Sequence[JobCurves], title: str) -> str:
    """The document. Jobs are in the order in which they arrived."""
    jobs = sorted(curves, key=lambda each: (_arrival(each), each.job))
    shown, left_out = jobs[:MOST_JOBS], len(jobs) - MOST_JOBS
    axis = _Axis(min(each.began for each in jobs), max(each.ended for each in jobs))
    has_total = len(shown) > 1 and any(each.loaders for each in shown)
    height = TOP + BAND * len(shown) + (TOTAL_HEIGHT + BAND_GAP if has_total else 0) + BOTTOM
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}">',
        f"<title>{_safe(title)}</title>",
        f"<style>{STYLE}</style>",
        f'<rect class="back" width="{WIDTH}" height="{height}"/>',
        _text(24, 30, title, "title"),
        _text(24, 50, _summary(jobs, axis, left_out), "dim"),
        *_legend(),
    ]
    bottom = height - BOTTOM + 6
    bands = [(TOP + BAND * place, each) for place, each in enumerate(shown)]
    for top, _ in bands:
        parts += [_panel(top, RATE_HEIGHT), _panel(top + RATE_HEIGHT + BETWEEN, LOADERS_HEIGHT)]
    if has_total:
        parts.append(_panel(TOP + BAND * len(shown), TOTAL_HEIGHT))
    parts += axis.draw(TOP - 6, bottom)
    for place, (top, each) in enumerate(bands):
        parts += _draw_job(each, top, COLOURS[place % len(COLOURS)], axis)
    if has_total:
        parts += _draw_total(shown, TOP + BAND * len(shown), axis)
    return "\n".join([*parts, "</svg>", ""])


def _arrival(curves: JobCurves) -> float:
    return next((at for event in ("arrived", "submitted", "began") if (at := curves.first(event)) is not None), 0.0)


def _summary(jobs: Sequence[JobCurves], axis: _Axis, left_out: int) -> str:
    more = f", the first {MOST_JOBS:,} are shown" if left_out > 0 else ""
    count = "1 job" if len(jobs) == 1 else f"{len(jobs):,} jobs"
    return f"{count}{more} · {duration(axis.last - axis.first)}"


# ── the time axis ──


class _Axis:
    STEPS = (
        *(0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800),
        *(3600 * hours for hours in (1, 2, 3, 6, 12, 24, 48, 120, 240, 720, 2400, 7200)),
    )
    MOST_TICKS = 11

    def __init__(self, first: float, last: float) -> None:
        self.first = first
        self.last = max(last, first + 1.0)

    def x(self, at: float) -> float:
        return LEFT + PLOT * min(1.0, max(0.0, (at - self.first) / (self.last - self.first)))

    def draw(self, top: float, bottom: float) -> list[str]:
        span = self.last - self.first
        step = next((step for step in self.STEPS if span / step <= self.MOST_TICKS), self.STEPS[-1])
        unit, scale = next(
            (u, s) for u, s in (("d", 86_400), ("h", 3600), ("min", 60), ("s", 1)) if step >= s or s == 1
        )
        parts = []
        for place in range(int(span / step + 1e-9) + 1):
            x = self.x(self.first + place * step)
            parts.append(_line(x, top, x, bottom, "grid"))
            parts.append(_text(x, bottom + 16, f"{place * step / scale:g}", "tick", "middle"))
        parts.append(_text(LEFT + PLOT, bottom + 32, f"time since the first submission, {unit}", "label", "end"))
        return parts


# ── a job ──


def _draw_job(curves: JobCurves, top: float, colour: str, axis: _Axis) -> list[str]:
    low, loaders_top = top + RATE_HEIGHT, top + RATE_HEIGHT + BETWEEN
    bottom = loaders_top + LOADERS_HEIGHT
    rates = [value for _, value in curves.throughput if value is not None]
    rate_scale = _nice(max(rates, default=0.0))
    most = max(1.0, math.ceil(max((count for _, count in curves.loaders), default=0)))
    parts = [f"<g><title>{_safe(curves.job)}</title>", *_describe(curves, top, colour)]
    parts += _scale(top, RATE_HEIGHT, rate_scale, curves.unit)
    parts += _scale(loaders_top, LOADERS_HEIGHT, most, "loaders")
    for still in curves.stills:
        if still.cause != "resize":
            x, end = axis.x(still.began), axis.x(still.began + still.seconds)
            shape = _rect(x, top, max(1.0, end - x), bottom - top, "still")
            parts.append(_tip(shape, still.text))
            if end - x > 8 * len(still.cause):
                parts.append(_text((x + end) / 2, top + 13, still.cause, "label", "middle"))
    for line in _lines(curves.throughput):
        points = [(axis.x(at), low - RATE_HEIGHT * min(1.0, value / rate_scale)) for at, value in line]
        parts += _area(points, low, colour, 0.16)
    parts += _draw_loaders(curves, loaders_top, most, colour, axis)
    return [*parts, *_marks(curves, top, bottom, axis), "</g>"]


def _draw_loaders(curves: JobCurves, top: float, most: float, colour: str, axis: _Axis) -> list[str]:
    low = top + LOADERS_HEIGHT
    points: list[tuple[float, float]] = []
    before = low
    for at, count in curves.loaders:
        y = low - LOADERS_HEIGHT * count / most
        points += [(axis.x(at), before), (axis.x(at), y)]
        before = y
    if not points:
        if curves.throughput:
            return [_text(axis.x(curves.throughput[0][0]) + 4, low - 6, "no ElasticLoader", "label")]
        return []
    end = axis.x(curves.ended)
    return _area([*points, (end, before), *([(end, low)] if curves.outcome else [])], low, colour, 0.3)


def _describe(curves: JobCurves, top: float, colour: str) -> list[str]:
    name = curves.job if len(curves.job) <= NAME_LENGTH else f"{curves.job[: NAME_LENGTH - 1]}…"
    took = duration(curves.ended - _arrival(curves)) if _arrival(curves) else ""
    lines = [f"{curves.outcome or 'running'}{' after ' if curves.outcome else ' for '}{took}"]
    if curves.mean is not None:
        lines += [f"{curves.step:,} steps", f"{number(curves.mean, 3)} {curves.unit}"]
    costs = [(still.cause, still.seconds) for still in curves.stills]
    for cause in dict.fromkeys(cause for cause, _ in costs):
        seconds = [each for other, each in costs if other == cause]
        lines.append(f"{len(seconds)} {cause}{'s' if len(seconds) != 1 else ''}: {_seconds(sum(seconds))} lost")
    parts = [f'<rect x="24" y="{top + 1:.1f}" width="10" height="10" rx="2" fill="{colour}"/>']
    parts.append(_tip(_text(40, top + 11, name, "name"), curves.job))
    return parts + [_text(40, top + 29 + 16 * place, line, "dim") for place, line in enumerate(lines[:6])]


def _seconds(seconds: float) -> str:
    return f"{1000 * seconds:.0f} ms" if seconds < 1 else duration(seconds)


def _marks(curves: JobCurves, top: float, bottom: float, axis: _Axis) -> list[str]:
    parts, labelled = [], -math.inf
    arrived = _arrival(curves)
    trains = min((at for at, _ in curves.throughput), default=curves.ended)
    if arrived and axis.x(trains) - axis.x(arrived) > LEAST_WAIT:
        line = _line(axis.x(arrived), top + RATE_HEIGHT / 2, axis.x(trains), top + RATE_HEIGHT / 2, "wait")
        parts.append(_tip(line, "waits for room, or starts"))
    for mark in curves.marks:
        x = axis.x(mark.at)
        if mark.event == "resized":
            parts.append(_tip(_line(x, top, x, bottom, "resize"), mark.text))
            moves = mark.text.partition(": ")[2].partition(" →")
            label = f"{moves[0]}→{moves[2].split()[0]}" if moves[2] else ""
            if x - labelled > 8 * len(label):
                parts.append(_text(x + 3, bottom - LOADERS_HEIGHT - 3, label, "label"))
                labelled = x
        elif mark.event == "ended":
            parts.append(_tip(_end(x, bottom, curves.outcome), mark.text))
        elif mark.event == "incident":
            parts.append(_tip(_line(x, top, x, top + RATE_HEIGHT, "failed"), mark.text))
    if arrived:
        x = axis.x(arrived)
        triangle = f'<path class="mark" d="M{x:.1f} {bottom + 2:.1f} l5 9 h-10 z"/>'
        parts.append(_tip(triangle, f"arrived after {duration(arrived - axis.first)}"))
    return parts


def _end(x: float, bottom: float, outcome: str) -> str:
    y = bottom + 6
    if outcome in {"done", "finished"}:
        return f'<rect class="mark" x="{x - 4:.1f}" y="{y - 4:.1f}" width="8" height="8"/>'
    cross = f"M{x - 4:.1f} {y - 4:.1f} l8 8 m0 -8 l-8 8"
    return f'<path class="failed" stroke-width="2.5" fill="none" d="{cross}"/>'


# ── all jobs ──


def _draw_total(jobs: Sequence[JobCurves], top: float, axis: _Axis) -> list[str]:
    """The loaders of all jobs, one upon the other."""
    moments = sorted({at for each in jobs for at, _ in each.loaders} | {each.ended for each in jobs if each.loaders})
    levels = [[_count_at(each, at) for each in jobs] for at in moments]
    most = max(1.0, max(map(sum, levels), default=1.0))
    low = top + TOTAL_HEIGHT
    parts = [_text(40, top + 11, "loaders of all jobs", "name"), *_scale(top, TOTAL_HEIGHT, most, "loaders")]
    for place in range(len(jobs)):
        upper: list[tuple[float, float]] = []
        lower: list[tuple[float, float]] = []
        for moment, following in zip(range(len(moments)), [*moments[1:], axis.last], strict=True):
            base = sum(levels[moment][:place])
            for points, count in ((lower, base), (upper, base + levels[moment][place])):
                y = low - TOTAL_HEIGHT * count / most
                points += [(axis.x(moments[moment]), y), (axis.x(following), y)]
        outline = " ".join(f"{x:.1f},{y:.1f}" for x, y in [*upper, *reversed(lower)])
        colour = COLOURS[place % len(COLOURS)]
        parts.append(_tip(f'<polygon points="{outline}" fill="{colour}" fill-opacity="0.75"/>', jobs[place].job))
    return parts


def _count_at(curves: JobCurves, at: float) -> float:
    if curves.outcome and at >= curves.ended:
        return 0.0
    return next((count for when, count in reversed(curves.loaders) if when <= at), 0.0)


# ── shapes ──


def _lines(points: Iterable[tuple[float, float | None]]) -> list[list[tuple[float, float]]]:
    """Lines without the gaps between them, with a bounded number of points."""
    values = [(at, value) for at, value in points if value is not None]
    steps = [later[0] - earlier[0] for earlier, later in pairwise(values)]
    limit = max(GAP_SECONDS, 5 * median(steps)) if steps else GAP_SECONDS
    lines: list[list[tuple[float, float]]] = []
    for at, value in values:
        if not lines or at - lines[-1][-1][0] > limit:
            lines.append([])
        lines[-1].append((at, value))
    every = math.ceil(len(values) / POINTS)
    return [_thinned(line, every) for line in lines] if every > 1 else lines


def _thinned(line: list[tuple[float, float]], every: int) -> list[tuple[float, float]]:
    groups = [line[place : place + every] for place in range(0, len(line), every)]
    return [(group[-1][0], sum(value for _, value in group) / len(group)) for group in groups]


def _area(points: Sequence[tuple[float, float]], low: float, colour: str, opacity: float) -> list[str]:
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    around = f"{points[0][0]:.1f},{low:.1f} {path} {points[-1][0]:.1f},{low:.1f}"
    return [
        f'<polygon points="{around}" fill="{colour}" fill-opacity="{opacity}"/>',
        f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.6" stroke-linejoin="round"/>',
    ]


def _scale(top: float, height: float, most: float, unit: str) -> list[str]:
    x = LEFT - 8
    return [
        _text(x, top + 9, f"{most:,.10g}", "tick", "end"),
        _text(x, top + height, "0", "tick", "end"),
        _text(x, top + height / 2 + 4, unit, "label", "end"),
        _line(LEFT, top + height, LEFT + PLOT, top + height, "axis"),
    ]


def _legend() -> list[str]:
    y, x = 46, WIDTH - RIGHT
    entries = [
        (_line(-4, y - 4, 8, y - 4, "wait"), "waits, starts", 112),
        (f'<path class="mark" d="M1 {y - 9} l5 9 h-10 z"/>', "arrival", 72),
        (_line(2, y - 10, 2, y + 2, "resize"), "loaders of each rank change", 202),
        (_rect(-7, y - 10, 13, 12, "still"), "pause, release, restart", 172),
        (_line(2, y - 10, 2, y + 2, "failed"), "incident", 78),
        (f'<rect class="mark" x="-3" y="{y - 8}" width="8" height="8"/>', "end", 42),
    ]
    parts = []
    for shape, text, width in reversed(entries):
        x -= width
        parts += [f'<g transform="translate({x},0)">{shape}', _text(11, y + 1, text, "dim"), "</g>"]
    return parts


def _nice(most: float) -> float:
    """The end of a scale that this value fits below."""
    if most <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(most))
    return next(step * power for step in (1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 8, 10) if step * power >= most)


def _panel(top: float, height: float) -> str:
    return _rect(LEFT, top, PLOT, height, "panel")


def _rect(x: float, y: float, width: float, height: float, kind: str) -> str:
    return f'<rect class="{kind}" x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}"/>'


def _line(x1: float, y1: float, x2: float, y2: float, kind: str) -> str:
    return f'<line class="{kind}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'


def _text(x: float, y: float, text: str, kind: str, anchor: str = "start") -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{_safe(text)}</text>'


def _tip(shape: str, text: str) -> str:
    """A shape with a text that appears under the pointer."""
    return f"<g>{shape}<title>{_safe(text)}</title></g>"


def _safe(text: str) -> str:
    return escape("".join(char if char.isprintable() else " " for char in text))
