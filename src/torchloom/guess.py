"""Did you mean: the nearest known words to a mistyped one."""

from __future__ import annotations

from collections.abc import Sequence

from torchloom.errors import Refused

_FEW = 50
"""So many names are listed whole when none is near."""


def did_you_mean(word: str, known: Sequence[str]) -> str:
    import difflib

    close = difflib.get_close_matches(word, known, n=3, cutoff=0.5)
    if close:
        return f"did you mean {' or '.join(close)}?"
    return f"there are: {', '.join(known)}" if 0 < len(known) <= _FEW else ""


def unknown(what: str, name: str, known: Sequence[str]) -> Refused:
    return Refused(f"there is no {what} {name!r}", hint=did_you_mean(name, sorted(known)) or f"no {what} is known yet")
