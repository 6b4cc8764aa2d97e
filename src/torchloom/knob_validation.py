"""Knobs: values that may be changed while a job runs, and the rule by which a value is accepted.

The command line, the weaver and the rank use the same functions, so that a value that one accepts is accepted by all.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from torchloom.errors import BadInput
from torchloom.protocol.rank import KnobSpec, Value

LOADERS, BATCH_SIZE = "loaders", "batch_size"
"""Knobs of the training loader."""
MAX_INT = 2**53
"""Whole numbers beyond this are not exact in every reader of JSON."""
MAX_TEXT = 1000
"""Characters of a text value."""
_YES = frozenset({"true", "yes", "on", "1"})
_NO = frozenset({"false", "no", "off", "0"})
_NUMBERS: Mapping[str, tuple[Callable[[str], Value], str]] = {
    "int": (int, "expected a whole number"),
    "float": (float, "expected a number"),
    "floats": (lambda text: tuple(map(float, text.split(","))), "expected numbers, separated by commas"),
}


class BadValue(BadInput):
    """A value that a knob cannot take."""

    def __init__(self, knob: str, value: object, why: str, hint: str = "") -> None:
        text = repr(value)
        super().__init__(f"{knob}={text if len(text) <= 60 else text[:57] + '...'}: {why}", hint=hint)
        self.knob = knob


def check(spec: KnobSpec, value: Value) -> Value:
    """The value as the knob takes it (a whole number becomes a float if the knob is one), or BadValue."""
    match spec.kind:
        case "bool":
            if not isinstance(value, bool):
                raise _bad(spec, value, "expected true or false")
        case "int":
            if isinstance(value, bool) or not isinstance(value, int):
                raise _bad(spec, value, "expected a whole number")
            if abs(value) > MAX_INT:
                raise _bad(spec, "…", f"more than {MAX_INT:g}, or less than its negative")
            return _within(spec, value)
        case "float":
            return _within(spec, _number(spec, value))
        case "floats":
            if not isinstance(value, tuple) or (isinstance(spec.value, tuple) and len(value) != len(spec.value)):
                count = len(spec.value) if isinstance(spec.value, tuple) else 0
                raise _bad(spec, value, f"expected {count} numbers, separated by commas")
            return tuple(_within(spec, _number(spec, part)) for part in value)
        case "enum":
            if value not in spec.choices:
                raise _bad(spec, value, f"expected one of {', '.join(spec.choices)}")
        case "text":
            if not isinstance(value, str):
                raise _bad(spec, value, "expected a text")
            if len(value) > MAX_TEXT:
                raise _bad(spec, value, f"{len(value)} characters are more than {MAX_TEXT}")
        case _:
            raise AssertionError(f"no rule for a knob of kind {spec.kind}")
    return value


def parse(spec: KnobSpec, text: str) -> Value:
    """The value that a person typed."""
    match spec.kind:
        case "bool":
            word = text.strip().lower()
            if word not in _YES | _NO:
                raise _bad(spec, text, "expected true or false")
            return word in _YES
        case "int" | "float" | "floats":
            number, expected = _NUMBERS[spec.kind]
            try:
                value = number(text)
            except ValueError:
                raise _bad(spec, text, expected) from None
            return check(spec, value)
        case "enum":
            text = next((choice for choice in spec.choices if choice.lower() == text.lower()), text)
    return check(spec, text)


_EXAMPLES: Mapping[str, str] = {"bool": "true", "int": "4", "float": "0.1", "floats": "0.9,0.99"}


def _bad(spec: KnobSpec, value: object, why: str) -> BadValue:
    """With the values that the knob takes, or an example of its kind."""
    low, high, example = spec.low, spec.high, _EXAMPLES.get(spec.kind)
    hint = f"such as {spec.name}={example}" if example else ""
    if spec.kind in {"int", "float"} and (low is not None or high is not None):
        least = "" if low is None else f"at least {low:g}"
        most = "" if high is None else f"at most {high:g}"
        hint = f"it takes {' and '.join(filter(None, (least, most)))}"
    return BadValue(spec.name, value, why, hint)


def _number(spec: KnobSpec, value: Value) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise _bad(spec, value, "expected a number")
    try:
        return float(value)
    except OverflowError:
        raise _bad(spec, "…", "too large for a number") from None


def _within(spec: KnobSpec, number: float) -> float:
    if not math.isfinite(number):
        raise _bad(spec, number, "expected a finite number")
    if spec.low is not None and number < spec.low:
        raise _bad(spec, number, f"below {spec.low:g}, the least it may be")
    if spec.high is not None and number > spec.high:
        raise _bad(spec, number, f"above {spec.high:g}, the most it may be")
    return number


def ramp(before: Value, after: Value, share: float) -> Value:
    """Part of the way from one value to the other; whole numbers stay whole."""
    if share >= 1:
        return after
    match before, after:
        case (tuple(), tuple()):
            return tuple(b + (a - b) * share for b, a in zip(before, after, strict=True))
        case (int() | float(), int() | float()) if not isinstance(after, bool):
            mixed = before + (after - before) * share
            return round(mixed) if isinstance(after, int) else mixed
    return before


def can_ramp(spec: KnobSpec) -> bool:
    return spec.kind in {"float", "int", "floats"}


def describe(spec: KnobSpec) -> str:
    """Its bounds or choices, for people."""
    if spec.kind == "enum":
        return " | ".join(spec.choices)
    low = "" if spec.low is None else f"{spec.low:g}"
    high = "" if spec.high is None else f"{spec.high:g}"
    return f"{low}..{high}" if low or high else spec.kind
