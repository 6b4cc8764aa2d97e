"""Whether something was so in most of the latest beats: a median without keeping the numbers.

The latest 16 answers are the bits of one plain number: a rank has many of them, and mostly all are 0.
"""

from __future__ import annotations

WINDOW = 16
MOST = WINDOW // 2 + 1
"""More than half: one slow beat, or a few, decide nothing."""
_MASK = (1 << WINDOW) - 1


def cast(votes: int, yes: bool) -> int:
    """With one more answer. What was never asked counts as no."""
    return (votes << 1 | yes) & _MASK


def carried(votes: int) -> bool:
    """Whether most of the latest say yes."""
    return votes.bit_count() >= MOST
