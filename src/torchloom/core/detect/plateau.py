"""Plateau: the loss has stopped improving.

How long a plateau must be depends on the run: late in training a loss may fall by one percent in hours. So the window
grows with the run. It is the latest half of all losses since the rank started, in two parts, older and newer. The
losses are reduced to medians of 32, and these are averaged so that 32 to 64 points cover the whole run. With s, the
standard deviation of the points within a part,

    fall  = mean of the older part − mean of the newer part
    error = s × √(1 / points in the older part + 1 / points in the newer part)

there is a plateau if three looks in a row, one at each new point, find that the loss is

    flat     |fall| ≤ 1.5 × error                it neither falls nor rises by more than noise
    certain  |fall| + 2 × error < 1 % of level   a fall by one percent would have shown

A noisy loss needs a longer run before it can be called flat, and a loss around 0 has no level to compare with. The
longer a loss falls slowly, the clearer that is: the fall over the window grows, and its error shrinks. The plateau is
over when two points in a row are below its level by one percent and by three times s.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean, median, variance

from torchloom.core.detect.detector import Block, Finding
from torchloom.protocol.phrase import phrase
from torchloom.protocol.rank import Beat, StepTimes
from torchloom.settings import Settings

BATCH = 32
"""Losses of which the median is taken, so that single spikes do not count."""
POINTS = 64
"""When there are this many, neighbours are merged."""
LEAST = POINTS * BATCH
"""Losses before the first look: warm-up and short runs are not judged."""
NOISE = 1.5
CERTAIN = 2.0
SHARE = 0.01
CLEAR = 3.0
LOOKS = 3
IMPROVED = 2


@dataclass(slots=True)
class PlateauDetector:
    settings: Settings
    """Every registered detector gets them; this one has its own constants."""
    _batch: list[float] = field(default_factory=list)
    _medians: list[float] = field(default_factory=list)
    """Those of the next point."""
    _size: int = 1
    """Medians in a point."""
    _points: array[float] = field(default_factory=lambda: array("d"))
    _count: int = 0
    """Losses so far."""
    _streak: int = 0
    """Looks in a row that found a plateau; while there is one, points in a row below its goal."""
    _goal: float | None = None
    """While there is a plateau: it is over below this."""
    _finding: Finding | None = None

    @property
    def due(self) -> bool:
        return self._finding is not None

    def learn(self, block: Block) -> None:
        self._take([loss for loss in block.loss if loss is not None])

    def hear(self, beat: Beat, _times: StepTimes, _now: float) -> Finding | None:
        if beat.loss is not None:
            self._take((beat.loss,))
        finding, self._finding = self._finding, None
        return finding._replace(step=beat.step) if finding is not None else None

    def _take(self, losses: Sequence[float]) -> None:
        self._batch += losses
        if len(self._batch) >= BATCH:
            self._reduce()

    def _reduce(self) -> None:
        """Turn the batch into a median, medians into a point, and look at each new point."""
        self._count += len(self._batch)
        self._medians.append(median(self._batch))
        self._batch.clear()
        if len(self._medians) < self._size:
            return
        point = fmean(self._medians)
        self._medians.clear()
        self._points.append(point)
        if self._goal is None:
            self._look()
        else:
            self._await_improvement(point, self._goal)
        if len(self._points) == POINTS:
            self._points = array("d", map(fmean, zip(self._points[::2], self._points[1::2], strict=True)))
            self._size *= 2

    def _look(self) -> None:
        if self._count < LEAST:
            return
        window = self._points[len(self._points) // 2 :]
        older, newer = window[: len(window) // 2], window[len(window) // 2 :]
        level, fall = fmean(newer), fmean(older) - fmean(newer)
        spread = math.sqrt((variance(older) + variance(newer)) / 2)
        error = spread * math.sqrt(1 / len(older) + 1 / len(newer))
        least = SHARE * abs(level)
        flat, certain = abs(fall) <= NOISE * error, abs(fall) + CERTAIN * error < least
        self._streak = self._streak + 1 if flat and certain else 0
        if self._streak < LOOKS:
            return
        self._goal, self._streak = level - max(least, CLEAR * spread), 0
        what = phrase("loss_flat", level=level, count=self._count // 2)
        evidence = phrase("loss_parts", older=level + fall, newer=level, error=error)
        self._finding = Finding("plateau", what, (evidence,))

    def _await_improvement(self, point: float, goal: float) -> None:
        self._streak = self._streak + 1 if point < goal else 0
        if self._streak >= IMPROVED:
            self._goal, self._streak = None, 0
            self._finding = Finding("plateau", phrase("loss_improves", value=point), over=True)
