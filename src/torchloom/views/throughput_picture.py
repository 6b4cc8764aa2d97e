"""The predicted throughput of a job as a picture (SVG): curve, error, measurements, present number."""

from __future__ import annotations

import math
from collections.abc import Iterable
from html import escape

from torchloom.protocol.scheduling import PredictionView
from torchloom.views.format.numbers import number
from torchloom.views.format.tables import cut

WIDTH, HEIGHT = 720, 440
_LEFT, _RIGHT, _TOP, _BOTTOM = 72, 24, 64, 60
_TICKS = 6
_STYLE = """
text { font: 13px system-ui, "DejaVu Sans", sans-serif; fill: #1f2328; }
.title { font-size: 17px; font-weight: 600; }
.note { fill: #6e7781; }
.paper { fill: #ffffff; }
.grid { stroke: #d8dee4; }
.axis { stroke: #6e7781; }
.curve { stroke: #0969da; stroke-width: 2.5; fill: none; }
.error { fill: #0969da; opacity: 0.18; }
.best { stroke: #6e7781; stroke-dasharray: 6 4; }
.now { stroke: #bc4c00; stroke-dasharray: 2 3; }
.measured { fill: #bc4c00; stroke: #ffffff; stroke-width: 1.5; }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3; }
  .note { fill: #8d96a0; }
  .paper { fill: #0d1117; }
  .grid { stroke: #30363d; }
  .axis, .best { stroke: #8d96a0; }
  .curve { stroke: #58a6ff; }
  .error { fill: #58a6ff; }
  .now { stroke: #ffa657; }
  .measured { fill: #ffa657; stroke: #0d1117; }
}
"""
"""Without variables of CSS, which few programs besides browsers know."""


def picture(view: PredictionView) -> str:
    """An SVG document; the curve must not be empty."""
    job, best = view.job, view.ceiling * sum(view.job.ranks.values())
    most = max(view.curve[-1].loaders, 1)
    peak = max([best, *(each.predicted + each.error for each in view.curve), *(e.measured or 0.0 for e in view.curve)])
    step = tick_step(peak)
    top = step * math.ceil(peak / step * 1.02)

    def x(loaders: float) -> float:
        return _LEFT + (WIDTH - _LEFT - _RIGHT) * loaders / most

    def y(rate: float) -> float:
        return HEIGHT - _BOTTOM - (HEIGHT - _TOP - _BOTTOM) * max(rate, 0.0) / top

    ranks = sum(job.ranks.values())
    subtitle = f"{ranks} rank{'s' if ranks != 1 else ''} on {', '.join(list(job.ranks)[:3])}"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img">',
        f"<title>Predicted throughput of {escape(job.job)}</title>",
        f"<style>{_STYLE}</style>",
        f'<rect class="paper" width="{WIDTH}" height="{HEIGHT}"/>',
        _text(_LEFT, 26, f"Predicted throughput of {cut(job.job, 40)}", "title"),
        _text(_LEFT, 46, f"{subtitle}; the band is one standard error", "note"),
    ]
    for count in range(round(top / step) + 1):
        rate = count * step
        parts.append(_line(_LEFT, y(rate), WIDTH - _RIGHT, y(rate), "grid"))
        parts.append(_text(_LEFT - 8, y(rate) + 4, f"{rate:,g}", "note", "end"))
    stride = math.ceil(most / 16)
    for loaders in range(0, most + 1, stride):
        parts.append(_line(x(loaders), y(0), x(loaders), y(0) + 5, "axis"))
        parts.append(_text(x(loaders), y(0) + 20, str(loaders), "note", "middle"))
    parts.append(_line(_LEFT, y(0), WIDTH - _RIGHT, y(0), "axis"))
    parts.append(_text((_LEFT + WIDTH - _RIGHT) / 2, HEIGHT - 16, "loaders of each rank", anchor="middle"))
    middle = (y(0) + y(top)) / 2
    parts.append(
        f'<text transform="translate(18 {middle:.1f}) rotate(-90)" text-anchor="middle">samples/s of the job</text>'
    )
    parts.append(_line(_LEFT, y(best), WIDTH - _RIGHT, y(best), "best"))
    parts.append(_text(_LEFT + 8, y(best) - 6, f"never waiting for data: {number(best, 3)} samples/s", "note"))
    upper = [(x(each.loaders), y(min(each.predicted + each.error, top))) for each in view.curve]
    lower = [(x(each.loaders), y(each.predicted - each.error)) for each in reversed(view.curve)]
    parts.append(f'<polygon class="error" points="{_points([*upper, *lower])}"/>')
    parts.append(
        f'<polyline class="curve" points="{_points((x(each.loaders), y(each.predicted)) for each in view.curve)}"/>'
    )
    if job.loaders is not None and job.loaders <= most:
        parts.append(_line(x(job.loaders), y(0), x(job.loaders), y(top), "now"))
        is_right = job.loaders > most * 0.8
        place = x(job.loaders) + (-6 if is_right else 6)
        parts.append(_text(place, y(0) - 8, f"{job.loaders} now", anchor="end" if is_right else "start"))
    for each in view.curve:
        if each.measured is not None:
            what = f"{each.loaders} loaders: {number(each.measured, 3)} samples/s measured"
            parts.append(
                f'<circle class="measured" cx="{x(each.loaders):.1f}" cy="{y(each.measured):.1f}" r="5.5">'
                f"<title>{what}</title></circle>"
            )
    parts.append(f'<circle class="measured" cx="{WIDTH - _RIGHT - 74}" cy="22" r="5.5"/>')
    parts.append(_text(WIDTH - _RIGHT, 26, "measured", anchor="end"))
    return "\n".join([*parts, "</svg>", ""])


def tick_step(peak: float) -> float:
    """A round distance between ticks: 1, 2 or 5 times a power of ten."""
    if peak <= 0:
        return 1.0
    raw = peak / _TICKS
    power = float(10 ** math.floor(math.log10(raw)))
    return next(power * factor for factor in (1, 2, 5, 10) if power * factor >= raw)


def _points(places: Iterable[tuple[float, float]]) -> str:
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in places)


def _line(x1: float, y1: float, x2: float, y2: float, kind: str) -> str:
    return f'<line class="{kind}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'


def _text(x: float, y: float, text: str, kind: str = "", anchor: str = "start") -> str:
    style = f' class="{kind}"' if kind else ""
    return f'<text{style} x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'
