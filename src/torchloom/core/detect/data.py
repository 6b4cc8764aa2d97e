"""Starved: most of each step is spent waiting for the next batch."""

from __future__ import annotations

from torchloom.core.detect.finding import Finding
from torchloom.core.detect.votes import carried, cast
from torchloom.core.detect.words import seconds
from torchloom.messages import StepTimes

DATA = "data"
"""The phase of a rank that waits for the next batch. That is part of training: it explains nothing, excuses nothing."""


class Hunger:
    __slots__ = ("_fed", "_hungry", "starved")

    def __init__(self) -> None:
        self.starved = False
        self._hungry = self._fed = 0
        """Votes."""

    def hear(self, times: StepTimes, data: float, most: float, step: int) -> Finding | None:
        """`data` is `times.data` where that is known."""
        hungry = data > most * times.p50
        if not self.starved:
            if not (hungry or self._hungry):
                return None
            self._hungry = cast(self._hungry, hungry)
            if not carried(self._hungry):
                return None
            self.starved, self._fed = True, 0
            what = f"waits for data during {100 * _share(data, times.p50):.0f} % of each step"
            return Finding("starved", what, (f"{seconds(times.p50)} a step, {seconds(data)} of it",), step=step)
        self._fed = cast(self._fed, data < most / 2 * times.p50)
        if not carried(self._fed):
            return None
        self.starved, self._hungry = False, 0
        what = f"no longer waits for data ({100 * _share(data, times.p50):.0f} % of each step)"
        return Finding("starved", what, over=True, step=step)


def _share(data: float, whole: float) -> float:
    return min(1.0, data / whole) if whole > 0 else 0.0
