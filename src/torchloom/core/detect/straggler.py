"""A rank that is slower than its peers, seen in what each needs itself, without waiting.

In a synchronous job all steps take the same time, that of the slowest rank; so their durations cannot tell who it is.
`StepTimes.own` can: what a rank needed without the waiting. On a busy machine it jumps from beat to beat, often between
two values, so that every rank looks slow for a while. Hence a rank is a straggler only if

    steady  three quarters of its latest beats are slower than three quarters of its peers' are
    slow    its mean ≥ factor × the median of its peers' means, over all beats that are kept
    clear   that is CLEAR times the error that such a mean has where beats differ as much as its peers' do, or as its
            own latest beats do: a rank that is slow now and then is no straggler
    sure    three looks on end find all that, and its latest beats are slow by the factor, too

Means and errors are those of logarithms: what is slow is slow by a factor, and one odd beat moves them little. Three
quarters, so that a burst of something else, which not all ranks feel, makes no straggler. The error is why the slow one
of quiet ranks is reported after a few beats, and of noisy ones after more. With two ranks the other one is the measure.
In jobs of more than 767 ranks, a sample of at least 256 of them stands for the peers of each.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from statistics import fmean
from typing import Generic, TypeVar

from torchloom.core.detect.detector import Finding
from torchloom.protocol.phrase import phrase
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
PEERS = 256
"""Ranks at least, evenly spread over a large job, that tell what is usual: their median is as good as that of all."""
Who = TypeVar("Who", bound=Hashable)


def kept(settings: Settings) -> int:
    """Of how many beats the own times are compared."""
    return 3 * settings.straggler_beats + 1


@dataclass
class StragglerDetector(Generic[Who]):
    """The ranks of one job side by side, by whatever names them."""

    slow: set[Who] = field(default_factory=set)
    _looks: dict[Who, int] = field(default_factory=dict)
    """In how many looks on end a rank was found slow that is not called so yet."""

    def look(self, own: Mapping[Who, Sequence[float]], settings: Settings) -> tuple[tuple[Who, Finding], ...]:
        """Compare the latest own times of all ranks; who became a straggler, and who no longer is one."""
        factor, latest = settings.straggler_factor, 2 * settings.straggler_beats
        most, noticeable = (3 * latest + 3) // 4, (1 + factor) / 2
        runners = {rank: times for rank, times in own.items() if len(times) >= most}
        peers = _Peers(list(runners.values()), latest, most)
        bound = max(LEAST, noticeable * _middle_of_others(peers.lowers, math.inf))
        few = latest - most + 1  # where most of the latest beats were slow, one of the last few was
        self.slow &= own.keys()
        looks, self._looks = self._looks, {}
        findings: list[tuple[Who, Finding]] = []
        for rank, times in runners.items():
            if max(islice(reversed(times), few)) < bound and not (self.slow and rank in self.slow):
                continue  # as mostly
            ordered = _latest(times, latest)
            middle = _middle(ordered)
            usual = _middle_of_others(peers.middles, middle)
            if usual <= 0:
                continue
            score = middle / usual
            if rank in self.slow:
                if score < noticeable:
                    self.slow.discard(rank)
                    findings.append((rank, Finding("straggler", phrase("as_fast_as_peers", times=score), over=True)))
            elif ordered[-most] >= bound and score >= factor and peers.exceeded(times, factor):
                self._looks[rank] = looks.get(rank, 0) + 1
                if self._looks[rank] >= SURE:
                    self.slow.add(rank)
                    others = len(runners) - 1
                    what = phrase("slower_than_peers", times=score, others=others)
                    evidence = phrase("own_work", own=middle, peers=usual, others=others)
                    findings.append((rank, Finding("straggler", what, (evidence,))))
        return tuple(findings)


class _Peers:
    """What ranks usually need, told by all of them, or by a sample of very many."""

    def __init__(self, runners: Sequence[Sequence[float]], latest: int, most: int) -> None:
        stride = max(0, len(runners) // PEERS - 1) | 1  # odd: ranks of a node are even in number, and differ by place
        self._own = runners[::stride]
        self._latest = latest
        ordered = [_latest(times, latest) for times in self._own]
        self.middles = sorted([_middle(times) for times in ordered])
        self.lowers = sorted([times[-most] for times in ordered])

    @cached_property
    def _logarithms(self) -> tuple[list[float], list[float]]:
        """Means and variances in ascending order. Needed only where a rank looks slow."""
        means, variances = zip(*map(_mean_and_variance, self._own), strict=True)
        return sorted(means), sorted(variances)

    def exceeded(self, times: Sequence[float], factor: float) -> bool:
        """Whether a rank is slower than its peers by this factor, and by more than noise."""
        means, variances = self._logarithms
        mean, own_variance = _mean_and_variance(times)
        excess = mean - _middle_of_others(means, mean)
        _, latest_variance = _mean_and_variance(_latest(times, self._latest))
        variance = max(_middle_of_others(variances, own_variance), latest_variance)
        error = math.sqrt(variance / len(times) * (1 + MEDIAN / (len(means) - 1)))
        return excess >= max(math.log(factor), CLEAR * error)


def _mean_and_variance(times: Sequence[float]) -> tuple[float, float]:
    """Of the logarithms of a rank's own times."""
    logs = sorted(math.log(max(one, LEAST)) for one in times)
    middle = _middle(logs)
    logs = [min(max(one, middle - ODD), middle + ODD) for one in logs]
    mean = fmean(logs)
    return mean, fmean([(one - mean) ** 2 for one in logs])


def _latest(times: Sequence[float], count: int) -> list[float]:
    """In ascending order."""
    return sorted(islice(times, max(0, len(times) - count), None))


def _middle(ordered: Sequence[float]) -> float:
    return ordered[len(ordered) // 2]


def _middle_of_others(ordered: list[float], one: float) -> float:
    """The median of all but one of them; 0 if there is no other. Between two it is the lesser: peers that are slow too
    must not excuse a rank."""
    others = len(ordered) - 1
    if others < 1:
        return 0.0
    middle = (others - 1) // 2
    return ordered[middle] if ordered[middle] < one else ordered[middle + 1]
