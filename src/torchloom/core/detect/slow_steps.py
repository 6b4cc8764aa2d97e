"""Slow steps: they take longer than they used to, or most of each is spent waiting for the next batch.

Slowdown: what a step takes is measured against the rank's own past. It is learnt from the first beats, as median and
spread, and then follows the rank so slowly that a decline over minutes still shows. A new normal is learnt, quietly,
where the past is no measure: values were changed, the batch has another size, or steps have become much faster.

Most of the latest beats must agree, a median without keeping the numbers; of a slowdown, more of them or all in a row,
because bursts of load and pauses also slow half of the beats now and then. The latest 16 answers are the bits of one
plain number: a rank has several of them, and mostly all are 0.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from torchloom.core.detect.detector import CLOSED, Block, Finding
from torchloom.protocol.data_loading import Loading
from torchloom.protocol.phrase import Phrase, Prose, phrase
from torchloom.protocol.rank import Beat, StepTimes
from torchloom.settings import Settings

DATA = "data"
"""The phase of a rank that waits for the next batch. That is part of training: it explains nothing, excuses nothing."""
WINDOW = 16
MOST = WINDOW // 2 + 1
"""More than half: one slow beat, or a few, decide nothing."""
_MASK = (1 << WINDOW) - 1
_ROW = (1 << MOST) - 1
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


def cast(votes: int, yes: bool) -> int:
    """With one more answer. What was never asked counts as no."""
    return (votes << 1 | yes) & _MASK


def carried(votes: int) -> bool:
    """Whether most of the latest say yes."""
    return votes.bit_count() >= MOST


def lasting(votes: int) -> bool:
    """Whether the latest say yes in a row, or three quarters of all do."""
    return votes & _ROW == _ROW or votes.bit_count() >= 3 * WINDOW // 4


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
        return self._slowed(p50, beat.step) if lasting(self._votes) else None

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
        evidence = (phrase("step_and_wait", step=p50, data=data), *_stages(beat.loading))
        return Finding("starved", phrase("waits_for_data", percent=percent), evidence, step=beat.step)


def _stages(loading: Loading | None) -> tuple[Phrase, ...]:
    """Where the time of a batch goes, if its loader measures that."""
    if loading is None or not loading.batches:
        return ()
    stages = {name: getattr(loading, name) for name in ("read", "decode", "collate", "transfer")}
    slowest = max(stages, key=lambda name: stages[name])
    whole = sum(stages.values())
    return (phrase("slowest_stage", stage=slowest, seconds=stages[slowest], whole=whole, loaders=loading.loaders),)
