"""Where the time of a job went, in a line or two."""

from __future__ import annotations

from collections.abc import Iterable

from torchloom.protocol.views import Goodput
from torchloom.views.format.times import duration

_CAUSES = {
    "waiting": "waiting for room",
    "redone": "steps that had to be done again",
    "moving": "moving off a node that left",
    "ending": "ending",
    "node": "lost nodes",
    "not_finite": "numbers that were not finite",
    "loss_spike": "jumps of the loss",
    "device_warning": "device warnings",
}
_LEAST_SECONDS = 0.05


def goodput(view: Goodput) -> str:
    """`92 % of 1 h 3 min was productive; lost: hang 3 min 2 s, starting 12 s`."""
    text = f"{share(view)} of {duration(view.elapsed)} was productive"
    causes = sorted(view.lost.items(), key=lambda item: -item[1])
    lost = [f"{_CAUSES.get(cause, cause)} {duration(seconds)}" for cause, seconds in causes if seconds > _LEAST_SECONDS]
    return f"{text}; lost: {', '.join(lost)}" if lost else text


def together(views: Iterable[Goodput]) -> Goodput | None:
    """Of several replicas: the time of all of them."""
    goodputs = list(views)
    if not goodputs:
        return None
    causes = {cause for view in goodputs for cause in view.lost}
    return Goodput(
        elapsed=sum(view.elapsed for view in goodputs),
        productive=sum(view.productive for view in goodputs),
        lost={cause: sum(view.lost.get(cause, 0.0) for view in goodputs) for cause in sorted(causes)},
    )


def share(view: Goodput) -> str:
    return f"{view.productive / view.elapsed:.0%}".replace("%", " %") if view.elapsed > 0 else "0 %"
