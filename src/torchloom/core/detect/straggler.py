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
of quiet ranks is reported after a few beats, and of noisy ones after more. With two ranks the other one is the measure.
In jobs of more than 767 ranks, a sample of at least 256 of them stands for the peers of each.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from functools import cached_property
from itertools import islice
from statistics import fmean
from typing import Generic, NamedTuple, TypeVar

from torchloom.core.detect.finding import Finding
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


class StragglerDetector(Generic[Who]):
    """The ranks of one job side by side, by whatever names them."""

    __slots__ = ("_looks", "slow")

    def __init__(self) -> None:
        self.slow: set[Who] = set()
        self._looks: dict[Who, int] = {}
        """In how many looks on end a rank was found slow that is not called so yet."""

    def look(self, own: Mapping[Who, Sequence[float]], settings: Settings) -> tuple[tuple[Who, Finding], ...]:
        """Compare the latest own times of all ranks; who became a straggler, and who no longer is one."""
        factor, latest = settings.straggler_factor, 2 * settings.straggler_beats
        most, noticeable = (3 * latest + 3) // 4, (1 + factor) / 2
        runners = {rank: times for rank, times in own.items() if len(times) >= most}
        peers = _Peers(runners, latest, most)
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
            elif ordered[-most] >= bound and score >= factor and peers.exceeded(rank, times, factor):
                self._looks[rank] = looks.get(rank, 0) + 1
                if self._looks[rank] >= SURE:
                    self.slow.add(rank)
                    findings.append((rank, _slow(score, middle, usual, len(runners))))
        return tuple(findings)


class _Past(NamedTuple):
    """The logarithms of a rank's own times."""

    mean: float
    variance: float
    beats: int


class _Peers(Generic[Who]):
    """What ranks usually need, told by all of them, or by a sample of very many."""

    def __init__(self, runners: Mapping[Who, Sequence[float]], latest: int, most: int) -> None:
        stride = max(0, len(runners) // PEERS - 1) | 1  # odd: ranks of a node are even in number, and differ by place
        self._own = dict(islice(runners.items(), 0, None, stride))
        ordered = [_latest(times, latest) for times in self._own.values()]
        self.middles = sorted([_middle(times) for times in ordered])
        self.lowers = sorted([times[-most] for times in ordered])

    @cached_property
    def _pasts(self) -> dict[Who, _Past]:
        """Needed only where somebody looks slow."""
        return {rank: _past(times) for rank, times in self._own.items()}

    @cached_property
    def _means(self) -> list[float]:
        return sorted([past.mean for past in self._pasts.values()])

    @cached_property
    def _variances(self) -> list[float]:
        return sorted([past.variance for past in self._pasts.values()])

    def exceeded(self, rank: Who, times: Sequence[float], factor: float) -> bool:
        """Whether a rank is slower than its peers by this factor, and by more than noise."""
        past = self._pasts.get(rank) or _past(times)
        excess = past.mean - _middle_of_others(self._means, past.mean)
        variance = _middle_of_others(self._variances, past.variance)
        error = math.sqrt(variance / past.beats * (1 + MEDIAN / (len(self._pasts) - 1)))
        return excess >= max(math.log(factor), CLEAR * error)


def _past(times: Sequence[float]) -> _Past:
    logs = sorted(math.log(max(one, LEAST)) for one in times)
    middle = _middle(logs)
    logs = [min(max(one, middle - ODD), middle + ODD) for one in logs]
    mean = fmean(logs)
    return _Past(mean, fmean([(one - mean) ** 2 for one in logs]), len(logs))


def _slow(score: float, own: float, peers: float, count: int) -> Finding:
    one = count == 2
    what = phrase("slower_than_peer" if one else "slower_than_peers", times=score)
    evidence = phrase("own_work_of_two" if one else "own_work_of_many", own=own, peers=peers, others=count - 1)
    return Finding("straggler", what, (evidence,))


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
