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
from typing import NamedTuple

from torchloom.core.detect.beat_block import CLOSED, Block
from torchloom.core.detect.finding import Finding
from torchloom.protocol.phrase import Prose, phrase
from torchloom.protocol.rank import Beat
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
PROCESS = phrase("memory_of_process")
DEVICE = phrase("memory_of_device")


class Growth(NamedTuple):
    """A steady growth: `mb` more in `over` seconds."""

    mb: float
    over: float
    window: float
    """Seconds that were looked at."""

    def left(self, free_mb: float) -> float:
        return free_mb * self.over / self.mb


class MemoryLeakDetector:
    __slots__ = ("_at", "_calm", "_high", "_horizon", "_least", "_low", "_mb", "_wait", "_warming", "what")

    def __init__(self, what: Prose, settings: Settings) -> None:
        self.what = what
        self._horizon = settings.memory_horizon_seconds
        self._at = array("d", [-math.inf])
        self._mb = array("d", [math.nan])
        """Samples, and before them one that is there for its time only."""
        self._warming = True
        self._low, self._high = math.inf, -math.inf
        """All samples are between these; so are some that are no longer kept, until that matters."""
        self._least = math.inf
        """MB by which samples must differ before a look is worth it."""
        self._wait = 0
        """Samples until the next look."""
        self._calm = -1
        """Looks without creeping since it was reported; -1: it was not."""

    @property
    def limits(self) -> tuple[float, float]:
        """With a sample between these, all samples still differ by less than is worth a look."""
        if self._calm >= 0 or self._high - self._low >= self._least:
            return CLOSED
        return self._high - self._least, self._low + self._least

    def keep(self, at: Sequence[float], mb: Sequence[float], free_mb: float) -> int:
        """Take samples, `free_mb` being left after the last of them; how many were taken."""
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

    def examine(self, now: float, mb: float, free_mb: float) -> Finding | None:
        self._wait -= self.keep((now,), (mb,), free_mb)
        if self._wait > 0 or self._warming or len(self._mb) == 1:
            return None
        self._wait = EVERY
        self._low, self._high = min(self._mb[1:]), max(self._mb[1:])
        if self._calm < 0 and self._high - self._low < self._least:
            return None
        return self._judge(mb, max(0.0, free_mb))

    def _judge(self, mb: float, free_mb: float) -> Finding | None:
        reported = self._calm >= 0
        for count in WINDOWS:
            growth = self._growth(count, mb + free_mb)
            if growth is None:
                continue
            left = growth.left(free_mb)
            if left < (2 * self._horizon if reported else min(self._horizon, FORESIGHT * growth.window)):
                self._calm = 0
                return None if reported else self._found(growth, mb, mb + free_mb, left)
        if reported:
            self._calm += 1
            if self._calm >= OVER:
                self._calm = -1
                return Finding("memory", phrase("memory_steady", what=self.what, mb=mb), over=True)
        return None

    def _found(self, growth: Growth, mb: float, limit_mb: float, left: float) -> Finding:
        rate = growth.mb / growth.over * 60
        return Finding(
            "memory",
            phrase("memory_grows", what=self.what, rate=rate, left=left),
            (phrase("memory_limit", mb=mb, limit=limit_mb),),
        )

    def _growth(self, count: int, limit_mb: float) -> Growth | None:
        """How the latest samples grow; None if they do not, or not steadily."""
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
        if total < CLEAR * strays[3 * count // 4]:
            return None
        window = self._at[-1] - self._at[-count - 1]
        return Growth(total, window * 3 / 4, window)


class ProcessMemory(MemoryLeakDetector):
    """Of its process, on a machine or in a cgroup."""

    __slots__ = ()

    def __init__(self, settings: Settings) -> None:
        super().__init__(PROCESS, settings)

    def learn(self, block: Block) -> None:
        if block.free_mb is not None:
            self.keep(block.at, block.rss_mb, block.free_mb)

    def hear(self, beat: Beat, now: float) -> Finding | None:
        return None if beat.free_mb is None else self.examine(now, beat.rss_mb, beat.free_mb)


class DeviceMemory(MemoryLeakDetector):
    """Of its devices."""

    __slots__ = ()

    def __init__(self, settings: Settings) -> None:
        super().__init__(DEVICE, settings)

    def learn(self, block: Block) -> None:
        if block.device_free_mb is None:
            return
        mb = [mb for mb in block.device_mb if mb is not None]
        if len(mb) == len(block.at):
            self.keep(block.at, mb, block.device_free_mb)

    def hear(self, beat: Beat, now: float) -> Finding | None:
        mb, free = beat.device_mb, beat.device_free_mb
        return None if mb is None or free is None else self.examine(now, mb, free)
