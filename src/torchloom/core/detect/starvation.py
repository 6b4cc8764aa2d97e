"""Starved: most of each step is spent waiting for the next batch."""

from __future__ import annotations

import math

from torchloom.core.detect.finding import Finding
from torchloom.core.detect.majority import carried, cast
from torchloom.protocol.phrase import phrase
from torchloom.protocol.rank import Beat, StepTimes
from torchloom.settings import Settings

DATA = "data"
"""The phase of a rank that waits for the next batch. That is part of training: it explains nothing, excuses nothing."""


class StarvationDetector:
    __slots__ = ("_fed", "_hungry", "_most", "starved")

    def __init__(self, settings: Settings) -> None:
        self.starved = False
        self._most = settings.starved_share
        self._hungry = self._fed = 0
        """Votes."""

    @property
    def limit(self) -> float:
        """Below this share of a step there is nothing to examine."""
        return -math.inf if self.starved or self._hungry else self._most

    def hear(self, beat: Beat, times: StepTimes) -> Finding | None:
        data, p50 = times.data, times.p50
        if data is None:
            return None
        if not self.starved:
            hungry = data > self._most * p50
            self._hungry = cast(self._hungry, hungry)
            if not carried(self._hungry):
                return None
            self.starved, self._fed = True, 0
            what = phrase("waits_for_data", percent=100 * _share(data, p50))
            return Finding("starved", what, (phrase("step_and_wait", step=p50, data=data),), step=beat.step)
        self._fed = cast(self._fed, data < self._most / 2 * p50)
        if not carried(self._fed):
            return None
        self.starved, self._hungry = False, 0
        what = phrase("data_comes_in_time", percent=100 * _share(data, p50))
        return Finding("starved", what, over=True, step=beat.step)


def _share(data: float, whole: float) -> float:
    return min(1.0, data / whole) if whole > 0 else 0.0
