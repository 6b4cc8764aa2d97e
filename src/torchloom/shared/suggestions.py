"""Suggestions for mistyped names: "did you mean …?"."""

from __future__ import annotations

from collections.abc import Sequence

from torchloom.errors import Refused

_FEW = 50
"""At most this number of names is listed when none is similar."""


def nearest(word: str, names: Sequence[str], cutoff: float = 0.5) -> list[str]:
    import difflib

    longer = [name for name in names if word and name.startswith(word)]
    return longer[:3] or difflib.get_close_matches(word, names, n=3, cutoff=cutoff)


def did_you_mean(word: str, names: Sequence[str]) -> str:
    if close := nearest(word, names):
        return f"did you mean {' or '.join(close)}?"
    return f"there are: {', '.join(names)}" if 0 < len(names) <= _FEW else ""


def unknown(what: str, name: str, names: Sequence[str]) -> Refused:
    return Refused(f"there is no {what} {name!r}", hint=did_you_mean(name, sorted(names)) or f"no {what} is known yet")
