"""Knobs for what an optimizer holds: lr, momentum, betas, weight decay, for each of its parameter groups.

A learning-rate scheduler computes the rate anew at every step, most from a base value that it keeps. So a change of lr
moves the base values of the scheduler by the same factor, and those of the schedulers inside it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torchloom.threadlet.knob import Knob, make_knob

OFFERED = ("lr", "momentum", "betas", "weight_decay")
_RATES = ("initial_lr", "max_lr", "min_lr")
"""What schedulers keep in a parameter group, in the unit of lr."""
_BASES = ("base_lrs", "max_lrs", "min_lrs", "_last_lr")
_BOUNDS: dict[str, tuple[float | None, float | None]] = {
    "lr": (0.0, None), "momentum": (0.0, 1.0), "betas": (0.0, 1.0), "weight_decay": (0.0, None),
}  # fmt: skip


def optimizer_knobs(optimizer: Any, scheduler: Any = None) -> Iterator[Knob]:
    """`lr` and the like; with several parameter groups `lr:0`, `lr:1`, …"""
    groups = optimizer.param_groups
    for index, group in enumerate(groups):
        for name in OFFERED:
            if name not in group or group[name] is None:
                continue
            low, high = _BOUNDS[name]
            yield make_knob(
                name if len(groups) == 1 else f"{name}:{index}",
                get=_getter(groups, index, name),
                set=_lr_setter(groups, index, scheduler) if name == "lr" else _setter(groups, index, name),
                type=None if name == "betas" else "float",
                low=low,
                high=high,
                help=f"{name} of {type(optimizer).__name__}" + (f", group {index}" if len(groups) > 1 else ""),
            )


def _getter(groups: list[dict[str, Any]], index: int, name: str) -> Callable[[], Any]:
    return lambda: groups[index][name]


def _setter(groups: list[dict[str, Any]], index: int, name: str) -> Callable[[Any], None]:
    def set_value(value: Any) -> None:
        _store(groups[index], name, value)

    return set_value


def _lr_setter(groups: list[dict[str, Any]], index: int, scheduler: Any) -> Callable[[float], None]:
    def set_lr(value: float) -> None:
        group = groups[index]
        before = float(group["lr"])
        for inner in _schedulers(scheduler):
            for name in _BASES:
                rates = getattr(inner, name, None)
                if isinstance(rates, list) and index < len(rates) and isinstance(rates[index], (int, float)):
                    rates[index] = _moved(rates[index], before, value)
        for name in _RATES if scheduler is not None else ():
            if isinstance(group.get(name), (int, float)):
                group[name] = _moved(group[name], before, value)
        _store(group, "lr", value)

    return set_lr


def _moved(rate: float, before: float, after: float) -> float:
    """By the factor by which the rate in force moves; from zero there is no factor, so to the new rate itself."""
    return rate * after / before if before else after


def _store(group: dict[str, Any], name: str, value: Any) -> None:
    kept = group[name]
    fill = getattr(kept, "fill_", None)  # a capturable optimizer keeps its lr as a tensor, which graphs refer to
    if fill is not None:
        fill(value)
    else:
        group[name] = value


def _schedulers(scheduler: Any) -> Iterator[Any]:
    """A scheduler and those inside it (SequentialLR, ChainedScheduler)."""
    if scheduler is None:
        return
    yield scheduler
    for inner in getattr(scheduler, "_schedulers", ()):
        yield from _schedulers(inner)
