"""The predicted throughput of a job, drawn as a table with bars: one row for each number of loaders."""

from __future__ import annotations

from torchloom.protocol.scheduling import PredictionView, ScheduledJob, Throughput
from torchloom.views.format.numbers import number
from torchloom.views.format.tables import Cell, Column, Screen, clean, table, wrapped
from torchloom.views.schedule_tables import amount, percent, predicted

MEASURED = "●"
_CERTAIN, _UNCERTAIN = "█", "░"
_EIGHTHS = " ▏▎▍▌▋▊▉"
_BARS, _NARROWEST = 40, 10
_OTHERS = 34
"""Columns of the table besides the bars and the predictions."""


def prediction(view: PredictionView, screen: Screen) -> list[str]:
    """A bar ends where the prediction is, less its error; what is uncertain is shaded, and a point is a measurement."""
    lines = wrapped(describe(view.job), screen.width, 2)
    lines[0] = lines[0].replace(view.job.job, screen.paint(view.job.job, "bold"), 1)
    if not view.curve:
        reason, remedy = reason_absent(view.job)
        return [*lines, f"  {reason}", f"  → {remedy}"]
    others = _OTHERS + max(len("PREDICTED"), *(len(predicted(each)) for each in view.curve))
    width = _BARS if screen.width is None else max(_NARROWEST, min(_BARS, screen.width - others))
    present = view.job.loaders
    best = _best(view)
    scale = (width - 1) / max([best, *(each.measured or 0.0 for each in view.curve)])
    columns: list[Column[Throughput]] = [
        Column("", lambda each: Cell("→", "cyan") if each.loaders == present else " "),
        Column("LOADERS", lambda each: Cell(f"{each.loaders:,}", "bold" * (each.loaders == present)), right=True),
        Column("PREDICTED", predicted, right=True),
        Column("MEASURED", lambda each: amount(each.measured) or " ", right=True),
        Column("OF BEST", lambda each: percent(each.share), right=True),
        Column("SAMPLES/S", lambda each: Cell(bar(each, scale, width), "cyan" if each.loaders == present else "blue")),
    ]
    lines += ["", *table(columns, view.curve, screen), ""]
    legend = f"→ now   {MEASURED} measured   {_UNCERTAIN} within the error   the whole width: {amount(best)} samples/s"
    notes = [screen.paint(line, "dim") for line in wrapped(legend, screen.width)]
    return [*lines, *notes, *_parameters(view, screen)]


def bar(each: Throughput, scale: float, width: int) -> str:
    """The prediction less its error, in eighths of a character; its error; and the measurement as a point."""
    low = max(0.0, each.predicted - each.error) * scale
    high = min(width, (each.predicted + each.error) * scale)
    if high - low < 1:
        end = each.predicted * scale
        cells = [_CERTAIN] * int(end) + [_EIGHTHS[int(end % 1 * len(_EIGHTHS))]]
    else:
        cells = [_CERTAIN] * int(low) + [_UNCERTAIN] * (int(high) - int(low))
    if each.measured is not None:
        place = min(width - 1, int(each.measured * scale))
        cells += [" "] * (place + 1 - len(cells))
        cells[place] = MEASURED
    return "".join(cells).rstrip()


def describe(job: ScheduledJob) -> str:
    """`hungry: 2 ranks on n1, 3 loaders each (requested 4, at least 1, weight 2)`."""
    count = sum(job.ranks.values())
    where = ", ".join(job.ranks) if len(job.ranks) <= 3 else f"{len(job.ranks):,} nodes"
    text = f"{job.job}: {count:,} rank{'s' if count != 1 else ''} on {where or 'no node'}"
    if job.loaders is None:
        return clean(text)
    notes = [f"requested {job.requested}"] if job.requested not in {None, job.loaders} else []
    notes += [f"at least {job.least}"] if job.least > 1 else []
    notes += [f"weight {job.weight:g}"] if job.weight != 1 else []
    shown = str(job.loaders) if job.target is None else f"{job.loaders} → {job.target}"
    noun = "loader" if shown == "1" else "loaders"
    listed = f" ({', '.join(notes)})" if notes else ""
    return clean(f"{text}, {shown} {noun}{' each' if count > 1 else ''}{listed}")


def reason_absent(job: ScheduledJob) -> tuple[str, str]:
    """Why nothing is predicted, and what to do."""
    if not job.ranks:
        return "it does not run, so nothing is predicted", "`loom jobs` lists those that do"
    if job.loaders is None:
        return "it has no ElasticLoader, so nothing is predicted", "docs/data-loading.md explains how to use one"
    if job.standing == "paused":
        return "it is paused, and was not measured before", f"`loom resume {job.job}` lets it continue"
    return "it is not measured yet", "the prediction comes some seconds after its first batches"


def _best(view: PredictionView) -> float:
    """Samples/s of the whole job, if it never waited for data."""
    return view.ceiling * sum(view.job.ranks.values())


def _parameters(view: PredictionView, screen: Screen) -> list[str]:
    ranks = sum(view.job.ranks.values())
    each = "" if ranks == 1 else " of a rank"
    slower = ""
    if view.contention >= 0.0005:
        slower = f", and each further one makes the work of all {number(100 * view.contention, 2)} % longer"
    text = (
        f"One loader{each} delivers {amount(view.rate)} samples/s{slower}. "
        f"Training{each} could take {amount(view.ceiling)} samples/s."
    )
    return wrapped(text, screen.width)
