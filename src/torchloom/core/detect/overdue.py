"""A checkpoint that should have come by now, judged by how regularly they came before."""

from __future__ import annotations

import itertools
from collections import deque

from torchloom.core.detect.finding import Finding
from torchloom.core.detect.words import seconds
from torchloom.settings import Settings

KEPT = 9
LEAST = 3
"""Checkpoints before anything is regular."""
FLOOR_SECONDS = 60.0


class Saves:
    """The checkpoints of one job."""

    __slots__ = ("_at", "overdue")

    def __init__(self) -> None:
        self._at: deque[float] = deque(maxlen=KEPT)
        self.overdue = False

    def saved(self, now: float) -> Finding | None:
        """One was written; whether that ends a wait that was told."""
        self._at.append(now)
        if not self.overdue:
            return None
        self.overdue = False
        return Finding("overdue", "a checkpoint was written", over=True)

    def excuse(self, for_seconds: float) -> None:
        """The job was paused, or away, so long: it is not held against it."""
        self._at = deque((at + for_seconds for at in self._at), maxlen=KEPT)

    def look(self, now: float, settings: Settings) -> Finding | None:
        if self.overdue or len(self._at) < LEAST:
            return None
        waited = now - self._at[-1]
        if waited <= FLOOR_SECONDS:
            return None
        intervals = sorted(after - before for before, after in itertools.pairwise(self._at))
        usual, longest = intervals[len(intervals) // 2], intervals[-1]
        if waited <= max(settings.overdue_factor * usual, 1.5 * longest):
            return None
        self.overdue = True
        what = f"no checkpoint for {seconds(waited)}; they came every {seconds(usual)}"
        return Finding("overdue", what, (f"the last {len(self._at)} were at most {seconds(longest)} apart",))
