"""Did you mean: the nearest known words to a mistyped one."""

from __future__ import annotations

from collections.abc import Sequence

_FEW = 30
"""So many names are listed whole when none is near."""


def did_you_mean(word: str, known: Sequence[str]) -> str:
    import difflib

    close = difflib.get_close_matches(word, known, n=3, cutoff=0.5)
    if close:
        return f"did you mean {' or '.join(close)}?"
    return f"there are: {', '.join(known)}" if 0 < len(known) <= _FEW else ""
