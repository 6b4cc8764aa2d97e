"""Memory that creeps up until the machine is full, reported before it is.

The latest samples are cut into four parts. Memory creeps if every part lies above the one before by about as much: a
one-time growth is a step, filling caches levels off, and neither does. Then

    seconds left = (limit − now) / slope

It is looked at over a long and a short window, so that a fast leak is seen early; neither is trusted to foretell more
than ten times its own length. Nothing is looked at while all samples differ by less than can fill what is left in time.
"""

from __future__ import annotations

import itertools
import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

from torchloom.core.detect.detector import CLOSED, Finding
from torchloom.protocol.phrase import Prose, phrase
from torchloom.settings import Settings

WINDOWS = (64, 16)
KEPT = WINDOWS[0] + 1
WARMING = 32
"""Samples at the start of a life that are not looked at: loading, first batches, caches."""
EVERY = 4
"""Samples from look to look."""
SPACING = 0.9
"""Seconds between two samples at least, on average."""
FORESIGHT = 10.0
LEAST_OF_FREE = 0.75 / FORESIGHT
"""Less growth than this share of what is left cannot fill it in time: growth is measured over 3/4 of a window."""
STEADY = 0.4
"""Each part must bring at least this share of the average growth."""
LEAST_MB = 16.0
LEAST_SHARE = 0.002
"""Of the limit: less growth than this over a window is noise."""
CLEAR = 6.0
"""The growth must be this many times the larger strays around it."""
OVER = 6
"""Looks in a row that saw no creeping, before it is over."""


@dataclass(slots=True)
class MemoryLeakDetector:
    """The memory of a process, on a machine or in a cgroup, or that of its devices."""

    what: Prose
    settings: Settings
    _at: array[float] = field(default_factory=lambda: array("d", [-math.inf]))
    _mb: array[float] = field(default_factory=lambda: array("d", [math.nan]))
    """Samples, and before them one that is there for its time only."""
    _warming: bool = True
    _low: float = math.inf
    _high: float = -math.inf
    """All samples are between these; so are some that are no longer kept, until that matters."""
    _least: float = math.inf
    """MB by which samples must differ before a look is worth it."""
    _wait: int = 0
    """Samples until the next look."""
    _calm: int = -1
    """Looks without creeping since it was reported; -1: it was not."""

    @property
    def limits(self) -> tuple[float, float]:
        """With a sample between these, all samples still differ by less than is worth a look."""
        if self._calm >= 0 or self._high - self._low >= self._least:
            return CLOSED
        return self._high - self._least, self._low + self._least

    def learn(self, at: Sequence[float], mb: Sequence[float | None], free_mb: float | None) -> None:
        """Take samples, `free_mb` being left after the last of them; nothing where one is not known."""
        samples = [sample for sample in mb if sample is not None]
        if free_mb is not None and len(samples) == len(at):
            self._keep(at, samples, free_mb)

    def hear(self, now: float, mb: float | None, free_mb: float | None) -> Finding | None:
        """Take a sample and look, if it is time."""
        if mb is None or free_mb is None:
            return None
        self._wait -= self._keep((now,), (mb,), free_mb)
        if self._wait > 0 or self._warming or len(self._mb) == 1:
            return None
        self._wait = EVERY
        self._low, self._high = min(self._mb[1:]), max(self._mb[1:])
        if self._calm < 0 and self._high - self._low < self._least:
            return None
        return self._judge(mb, max(0.0, free_mb))

    def _keep(self, at: Sequence[float], mb: Sequence[float], free_mb: float) -> int:
        """How many were kept."""
        fitting = (at[-1] - self._at[-1]) / SPACING
        if fitting < 1:
            return 0
        if fitting < len(at):  # beats are more frequent than samples need be
            every = math.ceil(len(at) / fitting)
            at, mb = at[every - 1 :: every], mb[every - 1 :: every]
        self._at += array("d", at)
        self._mb += array("d", mb)
        self._least = max(LEAST_MB, LEAST_OF_FREE * free_mb)
        if not self._warming:
            del self._at[:-KEPT], self._mb[:-KEPT]
            self._low, self._high = min(self._low, *mb), max(self._high, *mb)
        elif len(self._mb) > WARMING:
            self._warming = False
            del self._at[:-1], self._mb[:-1]
        return len(at)

    def _judge(self, mb: float, free_mb: float) -> Finding | None:
        reported, horizon = self._calm >= 0, self.settings.memory_horizon_seconds
        for count in WINDOWS:
            growth = self._growth(count, mb + free_mb)
            if growth is None:
                continue
            window = self._at[-1] - self._at[-count - 1]
            slope = growth / (window * 3 / 4)  # from the middle of the first part to that of the last
            left = free_mb / slope
            if left < (2 * horizon if reported else min(horizon, FORESIGHT * window)):
                self._calm = 0
                what = phrase("memory_grows", what=self.what, rate=60 * slope, left=left)
                evidence = phrase("memory_limit", mb=mb, limit=mb + free_mb)
                return None if reported else Finding("memory", what, (evidence,))
        if reported:
            self._calm += 1
            if self._calm >= OVER:
                self._calm = -1
                return Finding("memory", phrase("memory_steady", what=self.what, mb=mb), over=True)
        return None

    def _growth(self, count: int, limit_mb: float) -> float | None:
        """By how many MB the latest samples grow; None if they do not, or not steadily."""
        if len(self._mb) <= count:
            return None
        values = self._mb[-count:]
        part = count // 4
        middles = [sorted(values[i : i + part])[part // 2] for i in range(0, count, part)]
        total = middles[3] - middles[0]
        steps = [after - before for before, after in itertools.pairwise(middles)]
        if total < max(LEAST_MB, LEAST_SHARE * limit_mb) or min(steps) < STEADY * total / 3:
            return None
        slope = total / (3 * part)
        strays = sorted(
            abs(value - middles[i // part] - (i % part - part / 2) * slope) for i, value in enumerate(values)
        )
        return total if total >= CLEAR * strays[3 * count // 4] else None
