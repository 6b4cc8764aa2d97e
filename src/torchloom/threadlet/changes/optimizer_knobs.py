"""Knobs for the hyperparameters of an optimizer and its scheduler."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from torchloom.threadlet.changes.knob import Knob, make_knob

_CYCLED = ("momentum", "betas")
"""What OneCycleLR and CyclicLR set at every step, unless `cycle_momentum` is off."""
_RATES = ("initial_lr", "max_lr", "min_lr")
"""Rates that schedulers keep in a parameter group."""
_BASES = ("base_lrs", "max_lrs")
"""Rates that schedulers keep themselves, one per group."""
_BOUNDS: dict[str, tuple[float | None, float | None]] = {
    "lr": (0.0, None), "momentum": (0.0, 1.0), "betas": (0.0, 0.999999), "weight_decay": (0.0, None),
}  # fmt: skip
"""What is offered, with the least and the greatest value. A beta of 1 would divide by zero."""


def optimizer_knobs(optimizer: Any, scheduler: Any = None, prefix: str = "") -> Iterator[Knob]:
    """Knobs named `lr`, `momentum` and so on; with several parameter groups `lr:0`, `lr:1`, …

    A learning-rate scheduler computes the rate at every step, from the previous rate or from a base value that it
    keeps. A change of lr therefore scales the base values of the scheduler, and of the schedulers inside it, by the
    same factor: the rest of the schedule is scaled. A floor of the schedule (`eta_min`, `min_lr`) is not changed.
    """
    groups = optimizer.param_groups
    cycled = any(getattr(inner, "cycle_momentum", False) for inner in _schedulers(scheduler))
    for index, group in enumerate(groups):
        for name, (low, high) in _BOUNDS.items():
            if group.get(name) is None or (cycled and name in _CYCLED):
                continue
            yield make_knob(
                (f"{prefix}:" if prefix else "") + (name if len(groups) == 1 else f"{name}:{index}"),
                get=partial(_get, optimizer, index, name),
                set=partial(_set, optimizer, index, name, scheduler),
                type="floats" if name == "betas" else "float",
                low=low,
                high=high,
                role="lr" if name == "lr" else "",
                help=f"{name} of {type(optimizer).__name__}" + (f", group {index}" if len(groups) > 1 else ""),
            )


# The groups are looked up each time: an optimizer replaces them when it loads a state.


def _get(optimizer: Any, index: int, name: str) -> Any:
    return optimizer.param_groups[index][name]


def _set(optimizer: Any, index: int, name: str, scheduler: Any, value: Any) -> None:
    group = optimizer.param_groups[index]
    if name == "lr":
        _scale_schedule(group, index, scheduler, value)
    _store(group, name, value)


def _scale_schedule(group: Any, index: int, scheduler: Any, value: float) -> None:
    """Before the lr of a group is set: the rates from which its schedulers compute the next ones."""
    before = float(group["lr"])
    for inner in _schedulers(scheduler):
        floor = float(getattr(inner, "eta_min", 0.0))
        for name in _BASES:
            rates = getattr(inner, name, None)
            if isinstance(rates, list) and index < len(rates):
                _store(rates, index, _moved(float(rates[index]), before, value, floor))
        if index < len(getattr(inner, "_last_lr", ())):
            _store(inner._last_lr, index, value)  # a list that SequentialLR shares with the one inside
    for name in _RATES if scheduler is not None else ():
        if group.get(name) is not None:
            _store(group, name, _moved(float(group[name]), before, value))


def _moved(rate: float, before: float, after: float, floor: float = 0.0) -> float:
    """A rate scaled by the factor by which lr changes above the floor. If lr was zero, the new lr itself."""
    if not floor < min(before, after):
        floor = 0.0
    return floor + (rate - floor) * (after - floor) / (before - floor) if before else after


def _store(place: Any, key: Any, value: Any) -> None:
    fill = getattr(place[key], "fill_", None)  # a capturable optimizer keeps its lr as a tensor, which graphs refer to
    if fill is not None:
        fill(value)
    else:
        place[key] = value


def _schedulers(scheduler: Any) -> Iterator[Any]:
    """A scheduler and those inside it (SequentialLR, ChainedScheduler)."""
    if scheduler is None:
        return
    yield scheduler
    for inner in getattr(scheduler, "_schedulers", ()):
        yield from _schedulers(inner)
