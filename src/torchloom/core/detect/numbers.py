"""Numbers that went bad: not finite, or far above what they used to be.

A loss is noisy, and how noisy differs from job to job. So its jump is measured in spreads of its own recent past:

    spread = max((q75 − q25) / 1.35, (q90 − median) / 1.28, a share of the median)

The first two are the standard deviation of a bell curve, from numbers that single values do not move; the second is for
losses with a long upper tail, the third for one that hardly moves. More than `spike_factor` spreads above the median in
three of the last four beats is a spike; so is one beat six times as far. What looks like a spike is not learnt from; if
it stays, it is the new level.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable

from torchloom.core.detect.finding import Finding
from torchloom.messages import Beat, EventKind

KEPT = 64
LEARN_EVERY = 8
"""Values, while there are few; four times as many later."""
LEAST = 12
"""Values before anything is said."""
CONFIRMED = 3
_LATEST = 0b1111
"""Of so many values, one bit each."""
HUGE = 6.0
"""One value this many times as far away needs no second."""
STAYS = 120
"""Values after which a new level is accepted."""
LOSS_SECONDS = 0.02
"""A rank keeps the loss of a step if it has kept none for so long."""
CLEAN = 5
"""Finite beats after which a number is well again."""
LOSS_SHARE = 0.05
GRADIENT_SHARE = 0.5
_GRADIENT_NAMES = frozenset(
    {"grad_norm", "gradient_norm", "gnorm", "gradnorm", "grad_l2", "grad_l2_norm", "total_norm", "global_grad_norm"}
)


def is_gradient(name: str) -> bool:
    """Whether a metric is a gradient norm, by its name: "grad_norm", "train/grad-norm", "optim.gnorm"."""
    parts = name.lower().replace("-", "_").replace(".", "/").split("/")
    return parts[-1] in _GRADIENT_NAMES


class Finite:
    """NaN and infinity. A gradient norm may overflow now and then (loss scaling skips that step): see Level."""

    __slots__ = ("_clean", "_names")

    def __init__(self) -> None:
        self._names: tuple[str, ...] = ()
        self._clean = 0

    @property
    def ill(self) -> bool:
        return bool(self._names)

    def hear(self, beat: Beat, well: Beat | None) -> Finding | None:
        """`well`: the last beat that told a loss."""
        bad = tuple(name for name in beat.not_finite if not is_gradient(name))
        if bad:
            self._clean = 0
            # A metric may be undefined for long and harmlessly; a loss that follows it is told anew.
            told = self._names and ("loss" in self._names or "loss" not in bad)
            self._names = bad if "loss" in bad or not told else self._names
            return None if told else _not_finite(bad, beat, well)
        if self._names and beat.times is not None:
            self._clean += 1
            if self._clean >= CLEAN:
                names, self._names = self._names, ()
                return Finding("not_finite", f"{_and(names)} finite again", over=True, step=beat.step)
        return None


def _lag(beat: Beat) -> int:
    """Steps for which a loss may be older than the beat that tells it: where they are short, not each is kept."""
    p50 = beat.times.p50 if beat.times is not None else 0.0
    return int(LOSS_SECONDS / p50) if p50 > 0 else 0


def _not_finite(names: tuple[str, ...], beat: Beat, well: Beat | None) -> Finding:
    if beat.bad_steps is not None and "loss" in names:
        since, step = beat.bad_steps
        return Finding("not_finite", f"{_and(names)} NaN or infinite since step {step}", step=step, since=since)
    steps = beat.times.count if beat.times is not None else 0
    good = well.step - _lag(well) if well is not None else beat.step - 1 - steps
    since = min(max(1, good + 1), beat.step)
    return Finding("not_finite", f"{_and(names)} NaN or infinite at step {beat.step}", step=beat.step, since=since)


def _and(names: Iterable[str]) -> str:
    shown = list(names)
    return f"{', '.join(shown[:5])} {'is' if len(shown) == 1 else 'are'}"


class Level:
    """Whether a noisy number has jumped far above its recent past."""

    __slots__ = (
        "_above",
        "_calm",
        "_factor",
        "_heard",
        "_high",
        "_huge",
        "_kept",
        "_median",
        "_peak",
        "_share",
        "kind",
    )

    def __init__(self, kind: EventKind, factor: float, share: float) -> None:
        self.kind = kind
        self._factor = factor
        self._share = share
        self._kept = array("d")
        self._heard = 0
        """While calm, values taken in; since it began, how long it lasts."""
        self._median = self._peak = 0.0
        self._high = self._huge = self._calm = float("inf")
        self._above = 0
        """The latest values as bits, 1 above; negative: the finding is told, and counts back to its end."""

    def hear(self, name: str, value: float, step: int) -> Finding | None:
        if self._above < 0:
            return self._while_high(name, value, step)
        if value < self._high:
            if self._above:
                self._above = (self._above << 1) & _LATEST
            self._kept.append(value)
            heard = self._heard = self._heard + 1
            if heard % LEARN_EVERY == 0 and (heard <= KEPT or heard % (4 * LEARN_EVERY) == 0):
                self._learn()
            return None
        self._above = (self._above << 1 | 1) & _LATEST
        if value < self._huge and self._above.bit_count() < CONFIRMED:
            return None
        return self._begin(f"{name} jumped from about {self._median:.4g} to {value:.4g} at step {step}", step)

    def overflowed(self, name: str, step: int) -> Finding | None:
        """The value was infinite or NaN: as far above as can be, but it needs to be so more than once."""
        if self._above < 0:
            return None
        self._above = (self._above << 1 | 1) & _LATEST
        if self._above.bit_count() < CONFIRMED:
            return None
        return self._begin(f"{name} is NaN or infinite in most of the last beats, at step {step}", step)

    def _begin(self, what: str, step: int) -> Finding:
        self._above, self._heard = -CONFIRMED, 0
        recent = ", ".join(f"{value:.4g}" for value in self._kept[-5:])
        evidence = (f"before: {recent}", f"median {self._median:.4g}; above {self._high:.4g} is a jump")
        return Finding(self.kind, what, evidence if self._kept else (), step=step)

    def _while_high(self, name: str, value: float, step: int) -> Finding | None:
        self._heard += 1
        if self._heard > STAYS:
            del self._kept[:]
            self._high = self._huge = self._calm = float("inf")
            self._above = self._heard = 0
            return Finding(self.kind, f"{name} stays at its new level, {value:.4g}", over=True, step=step)
        self._above = self._above + 1 if value < self._calm else -CONFIRMED
        if self._above < 0:
            return None
        self._heard = 0
        return Finding(self.kind, f"{name} is back at {value:.4g}", over=True, step=step)

    def _learn(self) -> None:
        if len(self._kept) < LEAST:
            return
        del self._kept[:-KEPT]
        ordered = sorted(self._kept)
        count = len(ordered)
        median = self._median = ordered[count // 2]
        self._peak = max(self._peak, abs(median))
        width = ordered[3 * count // 4] - ordered[count // 4]
        tail = ordered[9 * count // 10] - median
        spread = max(width / 1.35, tail / 1.28, self._share * abs(median), 0.001 * self._peak, 1e-30)
        self._high = median + self._factor * spread
        self._huge = median + HUGE * self._factor * spread
        self._calm = median + self._factor / 2 * spread
