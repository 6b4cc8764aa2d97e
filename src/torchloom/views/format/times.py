"""Times as people read them: ages and durations, and moments of the local clock."""

from __future__ import annotations

from datetime import datetime

_MINUTE, _HOUR, _DAY = 60, 3600, 86_400


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
