"""Incarnations: the id of one start of a rank. 12 hex digits of milliseconds, 12 random ones; the greater is newer."""

from __future__ import annotations

import os
import re
import time

_VALID = re.compile(r"[0-9a-f]{24}")
_MOST_MS = 16**12 - 1
_latest_ms = 0
"""Two incarnations made in one process within a millisecond must still be in order."""
_given_used = False


def new_incarnation(now_ms: int | None = None, *, newer_than: str = "") -> str:
    """A new incarnation, newer than `newer_than` and than any made in this process, even if the clock is behind."""
    global _latest_ms  # noqa: PLW0603  one sequence for the process
    now = int(time.time() * 1000) if now_ms is None else now_ms
    floor = int(newer_than[:12], 16) + 1 if _VALID.fullmatch(newer_than) else 0
    _latest_ms = min(max(now, floor, _latest_ms + 1), _MOST_MS)
    # os.urandom, never the random module: its state belongs to the training.
    return f"{_latest_ms:012x}{os.urandom(6).hex()}"


def first_incarnation(given: str) -> str:
    """The one that a launcher chose (TORCHLOOM_INCARNATION), if it is valid and was not used in this process yet."""
    global _given_used  # noqa: PLW0603
    if _VALID.fullmatch(given) and not _given_used:
        _given_used = True
        return given
    return new_incarnation(newer_than=given if _given_used else "")
