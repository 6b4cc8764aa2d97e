"""A knob in the script: a value that the training loop reads and that operators can change at a step boundary.

Two are made here: for the checkpoint interval and the log level.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast, get_args

from torchloom.checkpoints.threadlet_bridge import CheckpointPort
from torchloom.errors import BadInput
from torchloom.knob_validation import check
from torchloom.protocol.data_loading import DataPlace
from torchloom.protocol.ids import NAME
from torchloom.protocol.rank import KnobRole, KnobSpec, Value

KINDS: dict[type, str] = {bool: "bool", int: "int", float: "float", str: "text"}
INTERVAL = "checkpoint_interval"
MAX_CHOICES = 64


class Knob:
    """Read `knob.value` in the loop: a plain attribute."""

    __slots__ = ("_get", "_set", "place", "spec", "value")

    def __init__(
        self, spec: KnobSpec, get: Callable[[], Any] | None = None, set: Callable[[Any], object] | None = None
    ) -> None:
        self.spec = spec
        self.value: Any = spec.value
        self._get = get
        self._set = set
        self.place: Callable[[int], DataPlace | None] | None = None
        """Where the training loader was when this number of steps was finished; of a knob that changes its batches."""

    def read(self) -> Value:
        """The current value, wherever it is kept."""
        if self._get is not None:
            with contextlib.suppress(Exception):  # a user's function, called from another thread
                return cast("Value", plain(self._get()))
        return cast("Value", self.value)

    def turn(self, value: Value) -> object:
        """Set the value; returns what the user's function returns, and raises what it raises."""
        result = self._set(value) if self._set is not None else None
        self.value = value
        return result

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
    role: KnobRole = "",
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
    if role not in get_args(KnobRole):
        raise BadInput(f"knob {name}: role={role!r}", hint=f"one of {', '.join(filter(None, get_args(KnobRole)))}")
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
        role=role,
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
