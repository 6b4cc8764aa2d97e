"""A checkpoint that should have come by now, judged by how regularly they came before."""

from __future__ import annotations

import itertools
import math
from collections import deque
from dataclasses import dataclass, field

from torchloom.core.detect.detector import Finding
from torchloom.protocol.phrase import phrase
from torchloom.settings import Settings

KEPT = 9
LEAST = 3
"""Checkpoints before anything is regular."""
FLOOR_SECONDS = 60.0


@dataclass
class CheckpointIntervalDetector:
    """The checkpoints of one job."""

    overdue: bool = False
    _at: deque[float] = field(default_factory=lambda: deque(maxlen=KEPT))
    _looked: float = math.inf
    """When it was last asked."""

    def saved(self, now: float) -> None:
        """A checkpoint was written: it is no longer overdue."""
        self._at.append(now)
        self.overdue = False

    def look(self, now: float, settings: Settings, *, trains: bool, starts: bool = False) -> Finding | None:
        """Ask once in a while. Time in which the job does not train (paused, ended, away) does not count. While it
        `starts`, before its first step, the count begins again."""
        passed, self._looked = max(0.0, now - self._looked), now
        if starts:
            trains, passed = False, now - self._at[-1] if self._at else 0.0
        if not trains:
            self._at = deque((at + passed for at in self._at), maxlen=KEPT)
            return None
        if self.overdue or len(self._at) < LEAST:
            return None
        waited = now - self._at[-1]
        intervals = sorted(after - before for before, after in itertools.pairwise(self._at))
        usual, longest = intervals[len(intervals) // 2], intervals[-1]
        if waited <= max(FLOOR_SECONDS, settings.overdue_factor * usual, 1.5 * longest):
            return None
        self.overdue = True
        what = phrase("checkpoint_late", waited=waited, usual=usual)
        return Finding("overdue", what, (phrase("checkpoints_apart", count=len(self._at), longest=longest),))
