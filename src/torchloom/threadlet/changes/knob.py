"""A knob in the script: a value that the training loop reads and that operators can change at a step boundary.

Some are made here: for the hyperparameters of an optimizer, the checkpoint interval and the log level.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, cast

from torchloom.checkpoints.threadlet_bridge import CheckpointPort
from torchloom.errors import BadInput
from torchloom.knob_rules import check
from torchloom.protocol.ids import NAME
from torchloom.protocol.rank import KnobSpec, Value

KINDS: dict[type, str] = {bool: "bool", int: "int", float: "float", str: "text"}
INTERVAL = "checkpoint_interval"
MAX_CHOICES = 64
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


class Knob:
    """Read `knob.value` in the loop: a plain attribute."""

    __slots__ = ("_get", "_set", "spec", "value")

    def __init__(
        self, spec: KnobSpec, get: Callable[[], Any] | None = None, set: Callable[[Any], object] | None = None
    ) -> None:
        self.spec = spec
        self.value: Any = spec.value
        self._get = get
        self._set = set

    def read(self) -> Value:
        """The current value, wherever it is kept."""
        if self._get is not None:
            with contextlib.suppress(Exception):  # a user's function, called from another thread
                return cast("Value", plain(self._get()))
        return cast("Value", self.value)

    def turn(self, value: Value) -> None:
        """Set the value. Raises what the user's function raises."""
        if self._set is not None:
            self._set(value)
        self.value = value

    def __repr__(self) -> str:
        return f"<Knob {self.spec.name}={self.read()!r}>"


def make_knob(
    name: str,
    value: Any = None,
    *,
    get: Callable[[], Any] | None = None,
    set: Callable[[Any], object] | None = None,
    type: type | str | None = None,
    low: float | None = None,
    high: float | None = None,
    choices: Sequence[str] = (),
    unit: str = "",
    help: str = "",
    per: str = "job",
) -> Knob:
    """A knob as the script describes it. Raises BadInput here, because nothing may raise later."""
    if not isinstance(name, str) or not NAME.fullmatch(name) or not name[0].isalpha() or len(name) > 64:
        raise BadInput(
            f"{name!r} cannot be the name of a knob", hint="a letter, then up to 63 letters, digits or _ : -"
        )
    if value is None and get is None:
        raise BadInput(f"knob {name} has neither a value nor a get function", hint=f"loom.knob({name!r}, 0.1)")
    if len(choices) > MAX_CHOICES or not all(isinstance(choice, str) for choice in choices):
        raise BadInput(f"knob {name}: choices={choices!r}", hint=f"up to {MAX_CHOICES} texts")
    if per not in {"job", "rank"}:
        raise BadInput(f"knob {name}: per={per!r} is neither 'job' nor 'rank'")
    value = plain(get() if value is None and get is not None else value)
    kind = type if isinstance(type, str) else KINDS.get(type) if type is not None else _kind(value, choices)
    if kind not in {"float", "int", "bool", "enum", "text", "floats"}:
        what = type or value.__class__.__name__
        raise BadInput(f"knob {name}: a {what} cannot be changed from outside", hint="use a number or a text")
    if kind == "float" and value.__class__ is int:
        value = float(value)
    spec = KnobSpec(
        name=name,
        kind=kind,  # type: ignore[arg-type]
        value=value,
        low=None if low is None else float(low),
        high=None if high is None else float(high),
        choices=tuple(choices),
        unit=unit[:32],
        help=help[:500],
        per=per,  # type: ignore[arg-type]
    )
    check(spec, value)
    return Knob(spec, get, set)


def log_level_knob() -> Knob:
    """A knob for the level of the process's root logger."""
    levels = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")
    root = logging.getLogger()

    def level() -> str:
        name = logging.getLevelName(root.level)
        return name if name in levels else "WARNING"

    return make_knob("log_level", get=level, set=root.setLevel, choices=levels, help="of the root logger")


def interval_knob(checkpoints: CheckpointPort) -> Knob:
    """A knob for the number of steps between two of these checkpoints."""
    set_interval, help = partial(setattr, checkpoints, "every"), "steps between two checkpoints"
    return make_knob(INTERVAL, get=lambda: checkpoints.every, set=set_interval, low=1, unit="steps", help=help)


def plain(value: Any) -> Any:
    """Numbers of numpy and torch as Python numbers, lists as tuples."""
    if isinstance(value, (list, tuple)):
        return tuple(float(part) for part in value)
    item = getattr(value, "item", None)  # numpy's float64 is a float too, but cannot be encoded
    return value if item is None else item()


def _kind(value: Any, choices: Sequence[str]) -> str:
    if isinstance(value, tuple):
        return "floats"
    if isinstance(value, str):
        return "enum" if choices else "text"
    return KINDS.get(value.__class__, "")


# ── optimizers ──


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
