"""Starved: most of each step is spent waiting for the next batch."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torchloom.core.detect.detector import Finding, carried, cast
from torchloom.protocol.phrase import phrase
from torchloom.protocol.rank import Beat, StepTimes
from torchloom.settings import Settings

DATA = "data"
"""The phase of a rank that waits for the next batch. That is part of training: it explains nothing, excuses nothing."""


@dataclass(slots=True)
class StarvationDetector:
    settings: Settings
    starved: bool = False
    _votes: int = 0
    """That it is starved; while it is, that it is not any more."""

    @property
    def limit(self) -> float:
        """Below this share of a step there is nothing to examine."""
        return -math.inf if self.starved or self._votes else self.settings.starved_share

    def hear(self, beat: Beat, times: StepTimes) -> Finding | None:
        data, p50, most = times.data, times.p50, self.settings.starved_share
        if data is None:
            return None
        self._votes = cast(self._votes, data < most / 2 * p50 if self.starved else data > most * p50)
        if not carried(self._votes):
            return None
        self.starved, self._votes = not self.starved, 0
        percent = 100 * min(1.0, data / p50) if p50 > 0 else 0.0
        if not self.starved:
            return Finding("starved", phrase("data_comes_in_time", percent=percent), over=True, step=beat.step)
        evidence = phrase("step_and_wait", step=p50, data=data)
        return Finding("starved", phrase("waits_for_data", percent=percent), (evidence,), step=beat.step)
