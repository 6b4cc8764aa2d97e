"""Memory that creeps up until the machine is full, told before it is.

The latest samples are cut into four parts. Memory creeps if every part lies above the one before by about as much: a
one-time growth is a step, filling caches levels off, and neither does. Then

    seconds left = (limit − now) / slope

It is looked at over a long and a short window, so that a fast leak is seen early; neither is trusted to foretell more
than ten times its own length.
"""

from __future__ import annotations

import itertools
from array import array
from typing import NamedTuple

from torchloom.core.detect.finding import Finding
from torchloom.core.detect.words import seconds

WINDOWS = (64, 16)
WARMING = 30
"""Samples at the start of a life that are not looked at: loading, first batches, caches."""
EVERY = 4
SPACING = 0.9
"""Seconds between two samples at least."""
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


class Growth(NamedTuple):
    """A steady growth: so much more in so many seconds."""

    mb: float
    over: float
    window: float
    """Seconds that were looked at."""

    def left(self, free_mb: float) -> float:
        return free_mb * self.over / self.mb


class Creep:
    __slots__ = ("_at", "_calm", "_due", "_mb", "_seen", "what")

    def __init__(self, what: str) -> None:
        self.what = what
        self._at = array("d")
        """When it was looked at; samples are taken EVERY times as often."""
        self._mb = array("d")
        self._seen = 0
        self._due = float("-inf")
        self._calm = -1
        """Looks without creeping since it was told; -1: it was not."""

    def hear(self, mb: float, limit_mb: float, now: float, horizon: float) -> Finding | None:
        if now < self._due:
            return None
        self._due = now + SPACING
        seen = self._seen = self._seen + 1
        if seen <= WARMING:
            return None
        self._mb.append(mb)
        return None if seen % EVERY else self._look(mb, limit_mb, now, horizon)

    def _look(self, mb: float, limit_mb: float, now: float, horizon: float) -> Finding | None:
        self._at.append(now)
        del self._at[: -WINDOWS[0] // EVERY - 1], self._mb[: -WINDOWS[0]]
        least = max(LEAST_MB, LEAST_OF_FREE * (limit_mb - mb))
        if self._calm < 0 and max(self._mb) - min(self._mb) < least:
            return None
        return self._judge(mb, limit_mb, horizon)

    def _judge(self, mb: float, limit_mb: float, horizon: float) -> Finding | None:
        told = self._calm >= 0
        for count in WINDOWS:
            growth = self._growth(count, limit_mb)
            if growth is None:
                continue
            left = growth.left(max(0.0, limit_mb - mb))
            if left < (2 * horizon if told else min(horizon, FORESIGHT * growth.window)):
                if told:
                    self._calm = 0
                    return None
                self._calm = 0
                return self._found(growth, mb, limit_mb, left)
        if told:
            self._calm += 1
            if self._calm >= OVER:
                self._calm = -1
                return Finding("memory", f"{self.what} grows no more: {mb:,.0f} MB", over=True)
        return None

    def _found(self, growth: Growth, mb: float, limit_mb: float, left: float) -> Finding:
        rate = growth.mb / growth.over * 60
        return Finding(
            "memory",
            f"{self.what} grows by {rate:,.0f} MB a minute: full in {seconds(left)}",
            (f"{mb:,.0f} MB now, {limit_mb:,.0f} MB is all there is",),
        )

    def _growth(self, count: int, limit_mb: float) -> Growth | None:
        """How the latest samples grow; None if they do not, or not steadily."""
        values = self._mb[-count:]
        if len(values) < count:
            return None
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
        window = self._at[-1] - self._at[-count // EVERY - 1]
        return Growth(total, window * 3 / 4, window)
