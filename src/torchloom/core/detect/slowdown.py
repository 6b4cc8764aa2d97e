"""Slowdown: steps take longer than they used to, measured against the rank's own past.

What a step takes is learnt from the first beats, as median and spread, and then follows the rank so slowly that a
decline over minutes still shows. Most of the latest beats must be slow. A new normal is learnt, quietly, where the past
is no measure: values were changed, the batch has another size, or steps have become much faster.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from torchloom.core.detect.detector import CLOSED, Block, Finding, carried, cast
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


@dataclass(slots=True)
class SlowdownDetector:
    settings: Settings
    slow: bool = False
    change: int = 0
    """The number of the change of values in force when the normal was learnt."""
    _normal: float = 0.0
    """Seconds a step takes; 0 while it is being learnt."""
    _slow_from: float = 0.0
    """A step that takes this many times the normal is slow."""
    _learning: list[float] = field(default_factory=list)
    _batch: float = 0.0
    """Samples in a step, smoothed over examined beats and the last of each block. 0: not known."""
    _normal_batch: float = 0.0
    """The same when the normal was learnt."""
    _votes: int = 0
    """That steps are slow; while they are, that they are not any more."""
    _fast: int = 0
    """Votes that steps have become much faster."""

    @property
    def limits(self) -> tuple[float, float]:
        """A step that takes so long needs no examination."""
        if not self._normal or self.slow or self._fast or self._votes:
            return CLOSED
        return self._normal / FASTER, self._normal * self._slow_from

    def learn(self, block: Block) -> None:
        normal = self._normal
        for p50 in block.p50:
            normal *= HIGHER if p50 > normal else LOWER
        self._normal = normal
        self._smooth(block.rate, block.p50[-1])

    def hear(self, beat: Beat, times: StepTimes) -> Finding | None:
        p50, normal = times.p50, self._normal
        self._smooth(beat.samples_per_second, p50)
        if beat.change != self.change:
            self.change = beat.change
            return self._anew(phrase("normal_learnt_again"), beat.step)
        if not normal:
            self._learn(p50)
            return None
        if self.slow:
            self._votes = cast(self._votes, p50 < normal * (1 + self.settings.slowdown_factor) / 2)
            if not carried(self._votes):
                return None
            self.slow, self._votes = False, 0
            return Finding("slowdown", phrase("steps_as_before", seconds=p50), over=True, step=beat.step)
        fast, slow = p50 < normal / FASTER, p50 > normal * self._slow_from
        if not (fast or slow or self._fast or self._votes):
            self._normal = normal * (HIGHER if p50 > normal else LOWER)
            return None
        self._fast, self._votes = cast(self._fast, fast), cast(self._votes, slow)
        if carried(self._fast):
            return self._anew("", beat.step)
        return self._slowed(p50, beat.step) if carried(self._votes) else None

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
            stray = (ordered[3 * LEARNT // 4] - ordered[LEARNT // 4]) / 1.35 / self._normal
            self._slow_from = max(self.settings.slowdown_factor, 1 + CLEAR * stray)
        self._normal_batch = self._batch
        self._learning = []

    def _anew(self, why: Prose, step: int) -> Finding | None:
        was_slow, self.slow = self.slow, False
        self._normal, self._learning = 0.0, []
        self._votes = self._fast = 0
        return Finding("slowdown", why, over=True, step=step) if was_slow else None

    def _slowed(self, p50: float, step: int) -> Finding | None:
        larger = self._batch / self._normal_batch if self._normal_batch and self._batch else 1.0
        if p50 / self._normal < self.settings.slowdown_factor * larger and larger > FASTER:
            return self._anew("", step)  # the batch has grown: a longer step is no slower one
        self.slow, self._votes = True, 0
        what = phrase("steps_slower", seconds=p50, times=p50 / self._normal, normal=self._normal)
        sample = p50 / self._batch * 1000 if self._batch and math.isfinite(self._batch) else None
        return Finding("slowdown", what, (phrase("beats_slow", sample_ms=sample),), step=step)
