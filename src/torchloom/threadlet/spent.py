"""Seconds of each step that went into one thing: a ring beside the meter's, written by the thread that trains.

A slot holds the number of its step too, so that nobody has to empty it when the next step begins: step() does nothing.
"""

from __future__ import annotations

RING = 8192
"""Steps that are remembered."""
_MASK = RING - 1


class Spent:
    def __init__(self) -> None:
        self._slots = [(0, 0.0)] * RING
        self.latest = 0
        """The last step that has any; 0 if none ever had."""

    def add(self, step: int, seconds: float) -> None:
        known, before = self._slots[step & _MASK]
        self._slots[step & _MASK] = (step, before + seconds if known == step else seconds)
        self.latest = step

    def of(self, step: int) -> float:
        known, seconds = self._slots[step & _MASK]
        return seconds if known == step else 0.0

    def less(self, seconds: list[float], first: int) -> list[float]:
        """Durations of the steps from `first` on, without this."""
        if self.latest < first:
            return seconds
        return [max(0.0, whole - self.of(step)) for step, whole in enumerate(seconds, first)]
