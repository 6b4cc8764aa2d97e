"""Slowdown: steps take longer than they used to, measured against the rank's own past.

What a step takes is learnt from the first beats, as median and spread, and then follows the rank so slowly that a
decline over minutes still shows. Most of the latest beats must be slow. A new normal is learnt, quietly, where the past
is no measure: values were changed, the batch has another size, or steps have become much faster.
"""

from __future__ import annotations

import math

from torchloom.core.detect.beat_block import CLOSED, Block
from torchloom.core.detect.finding import Finding
from torchloom.core.detect.majority import carried, cast
from torchloom.protocol.phrase import Prose, phrase
from torchloom.protocol.rank import Beat, StepTimes
from torchloom.settings import Settings

SETTLING = 3
"""Beats at the start that are not learnt from."""
LEARNT = 24
FOLLOW = 0.0003
"""Share by which the normal follows each beat: half as long again takes it twenty minutes."""
HIGHER, LOWER = 1 + FOLLOW, 1 - FOLLOW
CLEAR = 4.0
"""Spreads above the median that a slow beat must be, where beats differ much."""
FASTER = 1.25
SMOOTH = 0.2


class SlowdownDetector:
    __slots__ = (
        "_batch", "_factor", "_fast", "_high", "_learning", "_low", "_normal", "_normal_batch", "_slow", "_well",
        "change", "slow", "stray",
    )  # fmt: skip

    def __init__(self, settings: Settings) -> None:
        self.slow = False
        self._factor = settings.slowdown_factor
        self.stray = 0.0
        """How much the medians of beats differ, as a share of the normal."""
        self._normal = 0.0
        """Seconds a step takes; 0 while it is being learnt."""
        self._low = self._high = 0.0
        """What is fast and what is slow."""
        self._learning: list[float] = []
        self._batch = self._normal_batch = 0.0
        """Samples in a step, smoothed over examined beats and the last of each block; and when the normal was learnt.
        0: not known."""
        self.change = 0
        """The number of the change of values in force when the normal was learnt."""
        self._slow = self._well = self._fast = 0
        """Votes."""

    @property
    def limits(self) -> tuple[float, float]:
        """A step that takes so long needs no examination."""
        return (self._low, self._high) if self._normal and not (self.slow or self._fast or self._slow) else CLOSED

    def learn(self, block: Block) -> None:
        normal = self._normal
        for p50 in block.p50:
            normal *= HIGHER if p50 > normal else LOWER
        self._normal = normal
        self._smooth(block.rate, block.p50[-1])

    def hear(self, beat: Beat, times: StepTimes) -> Finding | None:
        p50 = times.p50
        self._smooth(beat.samples_per_second, p50)
        if beat.change != self.change:
            self.change = beat.change
            return self._anew(phrase("normal_learnt_again"), beat.step)
        normal = self._normal
        if not normal:
            self._learn(p50)
            self._bound()
            return None
        if not self.slow:
            fast, slow = p50 < self._low, p50 > self._high
            if not (fast or slow or self._fast or self._slow):
                self._normal = normal * (HIGHER if p50 > normal else LOWER)
                return None
            self._bound()
            self._fast, self._slow = cast(self._fast, fast), cast(self._slow, slow)
            if carried(self._fast):
                return self._anew("", beat.step)
            return self._slowed(p50, beat.step) if carried(self._slow) else None
        self._well = cast(self._well, p50 < normal * (1 + self._factor) / 2)
        if not carried(self._well):
            return None
        self.slow, self._slow = False, 0
        return Finding("slowdown", phrase("steps_as_before", seconds=p50), over=True, step=beat.step)

    def _smooth(self, rate: float | None, p50: float) -> None:
        if rate:
            self._batch += (SMOOTH if self._batch else 1.0) * (rate * p50 - self._batch)

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

    def _bound(self) -> None:
        """What counts as slow and as fast; the normal moves so slowly that it need not be done at each beat."""
        self._high = self._normal * max(self._factor, 1 + CLEAR * self.stray)
        self._low = self._normal / FASTER

    def _anew(self, why: Prose, step: int) -> Finding | None:
        was_slow, self.slow = self.slow, False
        self._normal, self._learning = 0.0, []
        self._slow = self._well = self._fast = 0
        return Finding("slowdown", why, over=True, step=step) if was_slow else None

    def _slowed(self, p50: float, step: int) -> Finding | None:
        larger = self._batch / self._normal_batch if self._normal_batch and self._batch else 1.0
        if p50 / self._normal < self._factor * larger and larger > FASTER:
            return self._anew("", step)  # the batch has grown: a longer step is no slower one
        self.slow, self._well = True, 0
        what = phrase("steps_slower", seconds=p50, times=p50 / self._normal, normal=self._normal)
        has_batch = self._batch and math.isfinite(self._batch)
        sample = p50 / self._batch * 1000 if has_batch else None
        evidence = phrase("beats_slow_by_sample" if has_batch else "beats_slow", sample_ms=sample)
        return Finding("slowdown", what, (evidence,), step=step)
