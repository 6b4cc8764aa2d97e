"""A rank that is slower than its peers, seen in what each needs itself, without waiting.

In a synchronous job all steps take the same time, that of the slowest rank; so their durations cannot tell who it is.
`StepTimes.own` can: what a rank needed without the waiting. A rank is a straggler if in most of the latest beats

    its time ≥ factor × the median of its peers' medians, and its median ≥ 1.2 × their slow beats

The second keeps quiet where all ranks differ from beat to beat. Most are three quarters, so that a burst of something
else on the machine, which not all ranks feel, makes no straggler. With two ranks the other one is the measure.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Generic, TypeVar

from torchloom.core.detect.finding import Finding
from torchloom.core.detect.words import seconds
from torchloom.settings import Settings

CLEAR = 1.2
Who = TypeVar("Who", bound=Hashable)


class Race(Generic[Who]):
    """The ranks of one job side by side, by whatever names them."""

    __slots__ = ("scores", "slow")

    def __init__(self) -> None:
        self.scores: dict[Who, float] = {}
        """Of each rank that can be compared: how many times its peers' time it needs."""
        self.slow: set[Who] = set()

    def look(self, own: Mapping[Who, Sequence[float]], settings: Settings) -> tuple[tuple[Who, Finding], ...]:
        """Compare the latest own times of all ranks; who became a straggler, and who no longer is one."""
        factor, most = settings.straggler_factor, (3 * settings.straggler_beats + 1) // 2
        runners = {rank: sorted(times) for rank, times in own.items() if len(times) >= most}
        middles = sorted(_at(times, 0.5) for times in runners.values())
        uppers = sorted(_at(times, 0.75) for times in runners.values())
        self.scores = {}
        found: list[tuple[Who, Finding]] = []
        for rank, times in runners.items():
            own_middle = _at(times, 0.5)
            peers = _middle_without(middles, own_middle)
            if peers <= 0:
                continue
            score = self.scores[rank] = own_middle / peers
            if rank not in self.slow:
                clear = own_middle >= CLEAR * _middle_without(uppers, _at(times, 0.75))
                if times[-most] >= factor * peers and clear:
                    self.slow.add(rank)
                    found.append((rank, _slow(score, own_middle, peers, len(runners))))
            elif score < (1 + factor) / 2:
                self.slow.discard(rank)
                found.append((rank, Finding("straggler", f"as fast as its peers again ({score:.2g} times)", over=True)))
        self.slow &= own.keys()
        return tuple(found)


def _slow(score: float, own: float, peers: float, count: int) -> Finding:
    measure = "the other needs" if count == 2 else f"the median of the {count - 1} others is"
    return Finding(
        "straggler",
        f"needs {score:.2g} times as long as its peer{'s' if count > 2 else ''}",
        (f"{seconds(own)} of its own work a step; {measure} {seconds(peers)}",),
    )


def _at(ordered: Sequence[float], share: float) -> float:
    return ordered[int(share * (len(ordered) - 1) + 0.5)]


def _middle_without(ordered: list[float], one: float) -> float:
    """The median of all but one of them; 0 if there is no other. Between two it is the lesser: peers that are slow too
    must not excuse a rank."""
    others = len(ordered) - 1
    if others < 1:
        return 0.0
    middle = (others - 1) // 2
    return ordered[middle] if ordered[middle] < one else ordered[middle + 1]
