"""Numbers that went bad: not finite, or far above what they used to be.

A loss is noisy, and how noisy differs from job to job. So its jump is measured in spreads of its own recent past:

    spread = max((q75 − q25) / 1.35, (q90 − median) / 1.28, a share of the median)

The first two are the standard deviation of a bell curve, from numbers that single values do not move; the second is for
losses with a long upper tail, the third for one that hardly moves. More than `spike_factor` spreads above the median in
three of the last four beats is a spike; so is one beat six times as far. What looks like a spike is not learnt from; if
it stays, it is the new level.
"""

from __future__ import annotations

import math
from array import array
from dataclasses import dataclass, field

from torchloom.core.detect.detector import Finding
from torchloom.protocol.job_spec import EventKind
from torchloom.protocol.phrase import phrase
from torchloom.protocol.rank import Beat
from torchloom.settings import Settings

KEPT = 64
LEARN_EVERY = 8
"""Values, for the first KEPT of them."""
LEARN_LATER = 32
"""Values, from then on."""
LEAST = 12
"""Values before anything is reported."""
CONFIRMED = 3
_LATEST = 0b1111
"""The latest four values, one bit each."""
HUGE = 6.0
"""One value this many times as far away needs no second."""
STAYS = 120
"""Values after which a new level is accepted."""
LOSS_SECONDS = 0.02
"""A rank keeps the loss of a step if it has kept none for this long."""
CLEAN = 5
"""Finite beats after which a number is well again."""
SHARES = {"loss_spike": 0.05, "gradient": 0.5}
"""The least spread of each kind, as a share of the median."""
_GRADIENT_NAMES = frozenset(
    {"grad_norm", "gradient_norm", "gnorm", "gradnorm", "grad_l2", "grad_l2_norm", "total_norm", "global_grad_norm"}
)


def is_gradient(name: str) -> bool:
    """Whether a metric is a gradient norm, by its name: "grad_norm", "train/grad-norm", "optim.gnorm"."""
    parts = name.lower().replace("-", "_").replace(".", "/").split("/")
    return parts[-1] in _GRADIENT_NAMES


@dataclass(slots=True)
class NonFiniteDetector:
    """NaN and infinity. A gradient norm may overflow now and then (loss scaling skips that step): see SpikeDetector."""

    names: tuple[str, ...] = ()
    """What is not finite and was reported."""
    _clean: int = 0

    def hear(self, beat: Beat, well: Beat | None) -> Finding | None:
        """`well`: the last beat with a loss."""
        bad = tuple(name for name in beat.not_finite if not is_gradient(name))
        if bad:
            self._clean = 0
            # A metric may be undefined for long and harmlessly; a loss that follows it is reported as well.
            reported = self.names and ("loss" in self.names or "loss" not in bad)
            self.names = bad if "loss" in bad or not reported else self.names
            return None if reported else _not_finite(bad, beat, well)
        if self.names and beat.times is not None:
            self._clean += 1
            if self._clean >= CLEAN:
                names, self.names = self.names, ()
                return Finding("not_finite", phrase("values_finite_again", names=names), over=True, step=beat.step)
        return None


def _not_finite(names: tuple[str, ...], beat: Beat, well: Beat | None) -> Finding:
    if beat.bad_steps is not None and "loss" in names:
        since, step = beat.bad_steps
        return Finding("not_finite", phrase("values_not_finite_since", names=names, step=step), step=step, since=since)
    if well is not None:
        # Where steps are short, not every loss is kept: it may be some steps older than its beat.
        p50 = well.times.p50 if well.times is not None else 0.0
        good = well.step - (int(LOSS_SECONDS / p50) if p50 > 0 else 0)
    else:
        good = beat.step - 1 - (beat.times.count if beat.times is not None else 0)
    since = min(max(1, good + 1), beat.step)
    what = phrase("values_not_finite_at", names=names, step=beat.step)
    return Finding("not_finite", what, step=beat.step, since=since)


@dataclass(slots=True)
class SpikeDetector:
    """Whether a noisy number has jumped far above its recent past."""

    kind: EventKind
    settings: Settings
    limit: float = math.inf
    """Below this there is nothing to examine."""
    aside: list[float] = field(default_factory=list)
    """Values below the limit, to learn from."""
    _kept: array[float] = field(default_factory=lambda: array("d"))
    _enough: int = LEARN_EVERY
    """As many values as are kept when the next lesson is due."""
    _lessons: int = 0
    """Since the start, or since a finding ended."""
    _lasts: int = 0
    """For how many values a finding has lasted."""
    _median: float = 0.0
    _peak: float = 0.0
    _jump: float = math.inf
    """So far above the median a value is too high."""
    _above: int = 0
    """The latest values as bits, 1 above; negative: the finding is reported, and counts back to its end."""

    def learn(self) -> None:
        """From the values that were put aside, once they are enough for a lesson."""
        if len(self._kept) + len(self.aside) >= self._enough:
            self._keep(self.aside)
            self._bound()

    def examine(self, name: str, value: float | None, step: int) -> Finding | None:
        """A value that overflowed is infinite: as far above as can be, but it needs to be so more than once."""
        if value is None or (self._above < 0 and math.isinf(value)):
            return None
        self._keep(self.aside)
        finding = self._judge(name, value, step)
        self._bound()
        return finding

    def _keep(self, values: list[float]) -> None:
        """Move values to those that are kept."""
        self._kept.fromlist(values)
        values.clear()
        if len(self._kept) >= self._enough:
            self._learn()

    def _bound(self) -> None:
        self.limit = -math.inf if self._above else self._median + self._jump

    def _judge(self, name: str, value: float, step: int) -> Finding | None:
        if self._above < 0:
            return self._while_high(name, value, step)
        high = value >= self._median + self._jump
        self._above = (self._above << 1 | high) & _LATEST
        if not high:
            self._keep([value])
            return None
        huge = self._median + HUGE * self._jump <= value < math.inf
        if not huge and self._above.bit_count() < CONFIRMED:
            return None
        what = phrase("value_jumped", name=name, usual=self._median, value=value, step=step)
        if math.isinf(value):
            what = phrase("value_overflows", name=name, step=step)
        self._above, self._lasts = -CONFIRMED, 0
        evidence = [phrase("values_before", values=self._kept[-5:].tolist())] if self._kept else []
        if self._kept and math.isfinite(self._jump):  # else nothing is learnt yet
            evidence.append(phrase("usual_level", median=self._median, high=self._median + self._jump))
        return Finding(self.kind, what, tuple(evidence), step=step)

    def _while_high(self, name: str, value: float, step: int) -> Finding | None:
        self._lasts += 1
        stays = self._lasts > STAYS
        if stays:
            del self._kept[:]
            self._jump, self._above = math.inf, 0
        else:
            self._above = self._above + 1 if value < self._median + self._jump / 2 else -CONFIRMED
            if self._above < 0:
                return None
        # What comes now may differ from what was before: learn as often as at the start.
        self._lessons = 0
        self._enough = len(self._kept) + LEARN_EVERY
        what = phrase("value_stays" if stays else "value_is_back", name=name, value=value)
        return Finding(self.kind, what, over=True, step=step)

    def _learn(self) -> None:
        del self._kept[:-KEPT]
        self._lessons += 1
        self._enough = len(self._kept) + (LEARN_EVERY if self._lessons < KEPT // LEARN_EVERY else LEARN_LATER)
        if len(self._kept) < LEAST:
            return
        ordered = sorted(self._kept)
        count = len(ordered)
        median = self._median = ordered[count // 2]
        self._peak = max(self._peak, abs(median))
        width = ordered[3 * count // 4] - ordered[count // 4]
        tail = ordered[9 * count // 10] - median
        spread = max(width / 1.35, tail / 1.28, SHARES[self.kind] * abs(median), 0.001 * self._peak, 1e-30)
        self._jump = self.settings.spike_factor * spread


@dataclass(slots=True)
class GradientSpikeDetector(SpikeDetector):
    """The norm of the gradients, by whatever name the job reports it."""

    name: str = ""
    metrics: int = 0
    """How many metrics there were when that name was looked for."""

    def hear(self, beat: Beat) -> Finding | None:
        overflow = next(filter(is_gradient, beat.not_finite), None)
        if overflow is not None:
            return self.examine(overflow, math.inf, beat.step)
        metrics = beat.metrics
        if len(metrics) != self.metrics:
            self.metrics = len(metrics)
            self.name = next(filter(is_gradient, metrics), "")
        return self.examine(self.name, metrics.get(self.name), beat.step)
