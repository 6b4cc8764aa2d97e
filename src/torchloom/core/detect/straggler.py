"""A rank that is slower than its peers, seen in what each needs itself, without waiting.

In a synchronous job all steps take the same time, that of the slowest rank; so their durations cannot tell who it is.
`StepTimes.own` can: what a rank needed without the waiting. On a busy machine it jumps from beat to beat, often between
two values, so that every rank looks slow for a while. Hence a rank is a straggler only if

    steady  three quarters of its latest beats are slower than three quarters of its peers' are
    slow    its mean ≥ factor × the median of its peers' means, over all beats that are kept
    clear   that is CLEAR times the error that such a mean has where beats differ as much as its peers' do
    sure    three looks on end find all that, and its latest beats are slow by the factor, too

Means and errors are those of logarithms: what is slow is slow by a factor, and one odd beat moves them little. Three
quarters, so that a burst of something else, which not all ranks feel, makes no straggler. The error is why the slow one
of quiet ranks is told after a few beats, and of noisy ones after more. With two ranks the other one is the measure.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from itertools import islice
from statistics import fmean
from typing import Generic, NamedTuple, TypeVar

from torchloom.core.detect.finding import Finding
from torchloom.core.detect.words import seconds
from torchloom.settings import Settings

CLEAR = 4.5
"""By chance a mean is so far off once in some hundred thousand looks; there are many looks."""
SURE = 3
"""Looks on end that must find it: what is slow by chance is not for long."""
MEDIAN = 1.5
"""The median of several numbers is less certain than their mean: its variance is about this many times as large."""
ODD = math.log(3)
"""A beat further from the rank's median than this factor counts as if it were so far: it may hold an evaluation."""
LEAST = 1e-9
Who = TypeVar("Who", bound=Hashable)


def kept(settings: Settings) -> int:
    """Of how many beats the own times are compared."""
    return 3 * settings.straggler_beats + 1


class Race(Generic[Who]):
    """The ranks of one job side by side, by whatever names them."""

    __slots__ = ("_looks", "scores", "slow")

    def __init__(self) -> None:
        self.scores: dict[Who, float] = {}
        """Of each rank that can be compared: how many times its peers' time it needs."""
        self.slow: set[Who] = set()
        self._looks: dict[Who, int] = {}
        """In how many looks on end a rank was found slow that is not called so yet."""

    def look(self, own: Mapping[Who, Sequence[float]], settings: Settings) -> tuple[tuple[Who, Finding], ...]:
        """Compare the latest own times of all ranks; who became a straggler, and who no longer is one."""
        factor, latest = settings.straggler_factor, 2 * settings.straggler_beats
        most, noticeable = (3 * latest + 3) // 4, (1 + factor) / 2
        runners = {rank: _latest(times, latest) for rank, times in own.items() if len(times) >= most}
        middles = sorted(_middle(times) for times in runners.values())
        lowers = sorted(times[-most] for times in runners.values())
        pasts: _Pasts[Who] | None = None
        self.scores = {}
        found: list[tuple[Who, Finding]] = []
        for rank, times in runners.items():
            middle = _middle(times)
            peers = _middle_without(middles, middle)
            if peers <= 0:
                continue
            score = self.scores[rank] = middle / peers
            if rank not in self.slow:
                if times[-most] < noticeable * _middle_without(lowers, times[-most]):
                    if self._looks:
                        self._looks.pop(rank, None)
                    continue  # as mostly
                pasts = pasts or _Pasts({rank: own[rank] for rank in runners})
                is_slow = score >= factor and pasts.slow(rank, factor)
                looks = self._looks[rank] = self._looks.get(rank, 0) + 1 if is_slow else 0
                if looks >= SURE:
                    self.slow.add(rank)
                    found.append((rank, _slow(score, middle, peers, len(runners))))
            elif score < noticeable:
                self.slow.discard(rank)
                found.append((rank, Finding("straggler", f"as fast as its peers again ({score:.2g} times)", over=True)))
        self.slow &= own.keys()
        return tuple(found)


class _Past(NamedTuple):
    """The logarithms of a rank's own times."""

    mean: float
    variance: float
    beats: int


class _Pasts(Generic[Who]):
    """What is needed to tell slow from noisy. Made only where somebody looks slow."""

    def __init__(self, own: Mapping[Who, Sequence[float]]) -> None:
        self._of = {rank: _past(times) for rank, times in own.items()}
        self._means = sorted(past.mean for past in self._of.values())
        self._variances = sorted(past.variance for past in self._of.values())

    def slow(self, rank: Who, factor: float) -> bool:
        """Whether a rank is slower than its peers by this factor, and by more than noise."""
        past = self._of[rank]
        excess = past.mean - _middle_without(self._means, past.mean)
        variance = _middle_without(self._variances, past.variance)
        error = math.sqrt(variance / past.beats * (1 + MEDIAN / (len(self._of) - 1)))
        return excess >= max(math.log(factor), CLEAR * error)


def _past(times: Sequence[float]) -> _Past:
    logs = sorted(math.log(max(one, LEAST)) for one in times)
    middle = _middle(logs)
    logs = [min(max(one, middle - ODD), middle + ODD) for one in logs]
    mean = fmean(logs)
    return _Past(mean, fmean([(one - mean) ** 2 for one in logs]), len(logs))


def _slow(score: float, own: float, peers: float, count: int) -> Finding:
    measure = "the other needs" if count == 2 else f"the median of the {count - 1} others is"
    return Finding(
        "straggler",
        f"needs {score:.2g} times as long as its peer{'s' if count > 2 else ''}",
        (f"{seconds(own)} of its own work a step; {measure} {seconds(peers)}",),
    )


def _latest(times: Sequence[float], count: int) -> list[float]:
    """In ascending order."""
    return sorted(islice(times, max(0, len(times) - count), None))


def _middle(ordered: Sequence[float]) -> float:
    return ordered[len(ordered) // 2]


def _middle_without(ordered: list[float], one: float) -> float:
    """The median of all but one of them; 0 if there is no other. Between two it is the lesser: peers that are slow too
    must not excuse a rank."""
    others = len(ordered) - 1
    if others < 1:
        return 0.0
    middle = (others - 1) // 2
    return ordered[middle] if ordered[middle] < one else ordered[middle + 1]
