"""Numbers as people read them: a loss, a rate, a count, a size, and a curve drawn in one line."""

from __future__ import annotations

from collections.abc import Sequence

from torchloom.protocol.knob_values import Value

_BARS = "▁▂▃▄▅▆▇█"
ABSENT = "-"


def number(value: float | None, digits: int = 4) -> str:
    """Some significant digits, without an exponent where a person would not use one."""
    if value is None:
        return ABSENT
    if value and not 1e-4 <= abs(value) < 1e7:
        return f"{value:.{digits - 1}e}"
    whole = len(str(int(abs(value)))) if abs(value) >= 1 else 0
    return f"{value:,.{max(0, digits - whole)}f}"


def size(count: int) -> str:
    """Bytes: `640 B`, `1.2 GB`, `120 MB`."""
    scaled, unit = float(count), "B"
    for larger in ("kB", "MB", "GB", "TB"):
        if scaled < 999.5:
            break
        scaled, unit = scaled / 1000, larger
    return f"{scaled:.1f} {unit}" if scaled < 9.95 and unit != "B" else f"{scaled:,.0f} {unit}"


def value(held: Value) -> str:
    """What a knob holds, as one would type it."""
    match held:
        case bool():
            return "true" if held else "false"
        case float():
            return f"{held:.10g}"
        case tuple():
            return ",".join(f"{part:.10g}" for part in held)
    return str(held)


def sparkline(values: Sequence[float | None], width: int) -> str:
    """The course of some values in `width` characters; a gap stays a blank."""
    if not values:
        return ""
    width = min(width, len(values))
    buckets = [values[i * len(values) // width : (i + 1) * len(values) // width] for i in range(width)]
    means = [_mean([v for v in bucket if v is not None]) for bucket in buckets]
    numbers = [m for m in means if m is not None]
    if not numbers:
        return " " * width
    low, high = min(numbers), max(numbers)
    scale = (len(_BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(" " if m is None else _BARS[round((m - low) * scale)] for m in means)


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None
