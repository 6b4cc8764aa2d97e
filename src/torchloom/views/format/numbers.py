"""Numbers and times as people read them: a loss, a size, a knob's value, a curve in one line, a duration, a moment."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from torchloom.protocol.rank import Value

_BARS = "▁▂▃▄▅▆▇█"
ABSENT = "-"
_MINUTE, _HOUR, _DAY = 60, 3600, 86_400


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
    present = [[v for v in bucket if v is not None] for bucket in buckets]
    means = [sum(bucket) / len(bucket) if bucket else None for bucket in present]
    numbers = [m for m in means if m is not None]
    low, high = min(numbers, default=0.0), max(numbers, default=0.0)
    scale = (len(_BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(" " if m is None else _BARS[round((m - low) * scale)] for m in means)


def duration(seconds: float) -> str:
    """`0.3 s`, `42 s`, `5 min 3 s`, `2 h 10 min`, `3 d 4 h`: two units at most."""
    seconds = max(0.0, seconds)
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    for unit, name, below, lesser in ((_DAY, "d", _HOUR, "h"), (_HOUR, "h", _MINUTE, "min"), (_MINUTE, "min", 1, "s")):
        if whole >= unit:
            rest = whole % unit // below
            return f"{whole // unit} {name} {rest} {lesser}" if rest else f"{whole // unit} {name}"
    return f"{whole} s"


def delay(seconds: float) -> str:
    """A duration that somebody has set: `0.5 s`, `2 s`, `30 min`."""
    return f"{seconds:g} s" if seconds < _MINUTE else duration(seconds)


def coarse(seconds: float) -> str:
    """The largest unit alone, for narrow columns: `42 s`, `5 min`, `3 d`."""
    return f"{seconds:.0f} s" if 1 <= seconds < _MINUTE - 0.5 else " ".join(duration(seconds).split()[:2])


def ago(at: float, now: float) -> str:
    return f"{duration(now - at)} ago"


def clock(at: float, now: float) -> str:
    """The local time of day, with the date where it is not today's."""
    moment = datetime.fromtimestamp(at)
    same_day = moment.date() == datetime.fromtimestamp(now).date()
    return moment.strftime("%H:%M:%S" if same_day else "%Y-%m-%d %H:%M:%S")


def stamp(at: float) -> str:
    """Date and time to the millisecond, local: what stands at the beginning of a log line."""
    return datetime.fromtimestamp(at).isoformat(sep=" ", timespec="milliseconds")
