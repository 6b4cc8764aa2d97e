"""Slowdown: steps take longer than they used to, measured against the rank's own past.

What a step takes is learnt from the first beats, as median and spread, and then follows the rank so slowly that a
decline over minutes still shows. Most of the latest beats must be slow. A new normal is learnt, quietly, where the past
is no measure: values were changed, the batch has another size, or steps have become much faster.
"""

from __future__ import annotations

import math

from torchloom.core.detect.finding import Finding
from torchloom.core.detect.votes import carried, cast
from torchloom.core.detect.words import seconds
from torchloom.messages import Beat, StepTimes

SETTLING = 3
"""Beats at the start that are not learnt from."""
LEARNT = 24
FOLLOW = 0.0003
"""Share by which the normal follows each beat: half as long again takes it twenty minutes."""
CLEAR = 4.0
"""Spreads above the median that a slow beat must be, where beats differ much."""
FASTER = 1.25
SMOOTH = 0.2


class Throughput:
    __slots__ = (
        "_batch", "_change", "_fast", "_high", "_learning", "_low", "_normal", "_normal_batch", "_slow", "_well",
        "slow", "stray",
    )  # fmt: skip

    def __init__(self) -> None:
        self.slow = False
        self.stray = 0.0
        """How much the medians of beats differ, as a share of the normal."""
        self._normal = 0.0
        """Seconds a step takes; 0 while it is being learnt."""
        self._low = self._high = 0.0
        """What is fast and what is slow."""
        self._learning: list[float] = []
        self._batch = self._normal_batch = 0.0
        """Samples in a step, smoothed; and when the normal was learnt. 0: not known."""
        self._change = 0
        self._slow = self._well = self._fast = 0
        """Votes."""

    def hear(self, beat: Beat, times: StepTimes, factor: float) -> Finding | None:
        p50 = times.p50
        if beat.samples_per_second:
            self._batch += (SMOOTH if self._batch else 1.0) * (beat.samples_per_second * p50 - self._batch)
        if beat.change != self._change:
            self._change = beat.change
            return self._anew("values were changed: what is normal is learnt anew", beat.step)
        normal = self._normal
        if not normal:
            self._learn(p50)
            self._bound(factor)
            return None
        if not self.slow:
            fast, slow = p50 < self._low, p50 > self._high
            if not (fast or slow or self._fast or self._slow):
                if p50 > normal:
                    self._normal = normal * (1 + FOLLOW)
                else:
                    self._normal = normal * (1 - FOLLOW)
                return None
            self._bound(factor)
            self._fast, self._slow = cast(self._fast, fast), cast(self._slow, slow)
            if carried(self._fast):
                return self._anew("", beat.step)
            return self._slowed(p50, factor, beat.step) if carried(self._slow) else None
        self._well = cast(self._well, p50 < normal * (1 + factor) / 2)
        if not carried(self._well):
            return None
        self.slow, self._slow = False, 0
        return Finding("slowdown", f"steps take {seconds(p50)} again", over=True, step=beat.step)

    def _learn(self, p50: float) -> None:
        self._learning.append(p50)
        if len(self._learning) < SETTLING + LEARNT:
            return
        ordered = sorted(self._learning[SETTLING:])
        self._normal = ordered[LEARNT // 2]
        if self._normal > 0:
            self.stray = (ordered[3 * LEARNT // 4] - ordered[LEARNT // 4]) / 1.35 / self._normal
        self._normal_batch = self._batch
        self._learning = []

    def _bound(self, factor: float) -> None:
        """What counts as slow and as fast; the normal moves so slowly that it need not be done at each beat."""
        self._high = self._normal * max(factor, 1 + CLEAR * self.stray)
        self._low = self._normal / FASTER

    def _anew(self, why: str, step: int) -> Finding | None:
        was_slow, self.slow = self.slow, False
        self._normal, self._learning = 0.0, []
        self._slow = self._well = self._fast = 0
        return Finding("slowdown", why, over=True, step=step) if was_slow else None

    def _slowed(self, p50: float, factor: float, step: int) -> Finding | None:
        larger = self._batch / self._normal_batch if self._normal_batch and self._batch else 1.0
        if p50 / self._normal < factor * larger and larger > FASTER:
            return self._anew("", step)  # the batch has grown: a longer step is no slower one
        self.slow, self._well = True, 0
        ratio = p50 / self._normal
        what = f"steps take {seconds(p50)}, {ratio:.1f} times as long as before ({seconds(self._normal)})"
        rate = f", {p50 / self._batch * 1000:.3g} ms a sample" if self._batch and math.isfinite(self._batch) else ""
        return Finding("slowdown", what, (f"most of the latest beats were slow{rate}",), step=step)
