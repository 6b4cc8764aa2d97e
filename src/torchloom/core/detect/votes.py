"""Whether something was so in most of the latest beats: a median without keeping the numbers."""

from __future__ import annotations

WINDOW = 16
MOST = WINDOW // 2 + 1
"""More than half: one slow beat, or a few, decide nothing."""
_MASK = (1 << WINDOW) - 1


class Votes:
    """The latest 16 answers, as bits of one number."""

    __slots__ = ("bits",)

    def __init__(self) -> None:
        self.bits = 0
        """0: nothing to be counted, as mostly."""

    def cast(self, yes: bool) -> bool:
        """Take in one answer; whether most of the latest say yes. What was never asked counts as no."""
        if not yes and not self.bits:
            return False
        self.bits = bits = (self.bits << 1 | yes) & _MASK
        return bits.bit_count() >= MOST

    def clear(self) -> None:
        self.bits = 0
