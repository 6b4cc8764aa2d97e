"""Mixes of jobs that share the loaders of a node, and what allocations would give them in the model.

The jobs sleep, so their true curve is known: min(r·w, G) samples/s with w loaders, and without any, load and train in
turn. The best allocations that the benchmark compares with are found with it, by trying all of them at each arrival
and departure.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from torchloom.core.scheduling.cluster_loaders import ClusterLoaders, Job
from torchloom.core.scheduling.policies import Torchloader
from torchloom.core.scheduling.simulation import Arrival, Outcome, simulate
from torchloom.core.scheduling.throughput_model import Curve

NODE = "n1"


@dataclass(frozen=True)
class SharingJob:
    name: str
    samples: int
    rate: float
    """Samples/s of one loader."""
    ceiling: float
    """Samples/s of training that never waits."""
    arrival: float
    """Seconds after the first."""
    requested: int
    """Loaders, in the file of the user."""

    def share(self, loaders: int) -> float:
        """T/G, as it really is."""
        if not loaders:
            return self.rate / (self.rate + self.ceiling)
        return min(self.rate * loaders / self.ceiling, 1.0)

    def described(self) -> Job:
        """Least one loader, as jobs have by default."""
        curve = Curve(self.rate, self.ceiling)
        return Job(self.name, {NODE: 1}, curve, 1, requested=self.requested, remaining=float(self.samples))


@dataclass(frozen=True)
class Mix:
    title: str
    budget: int
    jobs: tuple[SharingJob, ...]

    def scaled(self, samples: float) -> Mix:
        """With a part of the samples, and arrivals as much earlier."""
        jobs = (replace(job, samples=int(job.samples * samples), arrival=job.arrival * samples) for job in self.jobs)
        return replace(self, jobs=tuple(jobs))


HUNGRY = Mix(
    "one hungry job and two light ones",
    9,
    (
        SharingJob("hungry", 8000, 50, 400, 0, 5),
        SharingJob("light", 1000, 100, 50, 3, 2),
        SharingJob("lighter", 1000, 100, 50, 6, 2),
    ),
)
ARCHITECTURES = Mix(
    "three architectures",
    9,
    (
        SharingJob("vgg", 2000, 40, 90, 0, 3),
        SharingJob("googlenet", 5000, 50, 300, 6, 3),
        SharingJob("resnet", 4000, 60, 200, 12, 3),
    ),
)
"""As in the paper: three networks of different speed arrive one after the other, and their file divides the loaders
evenly. The times are a tenth."""


class Best:
    """All allocations tried, by what is really so: the greatest Σ T/G at each arrival and departure."""

    restarted: ClassVar[Collection[str]] = ()

    def __init__(self, mix: Mix) -> None:
        self.jobs = {job.name: job for job in mix.jobs}

    def decide(self, cluster: ClusterLoaders, _nodes: Collection[str], _now: float, /) -> None:
        members = list(cluster.members.values())
        budget = cluster.budgets[NODE]
        for member in members:
            member.shares[:] = [self.jobs[member.job.name].share(loaders) for loaders in range(budget + 1)]
            member.values[:] = member.shares
        best = max(
            splits(budget, len(members)),
            key=lambda split: sum(member.shares[w] for member, w in zip(members, split, strict=True)),
            default=(),
        )
        for member in members:
            cluster.resize(member, 0)
        for member, loaders in zip(members, best, strict=True):
            cluster.resize(member, loaders)


def splits(budget: int, jobs: int) -> Iterator[Sequence[int]]:
    """All ways to give at most this number of loaders to some jobs."""
    ways = itertools.product(range(budget + 1), repeat=jobs)
    return (split for split in ways if sum(split) <= budget)


def simulate_best(mix: Mix, delays: Mapping[str, float]) -> Outcome:
    """With all allocations tried, and resizes that take no time; `delays`: from a job's arrival to its first step."""
    arrivals = [Arrival(job.arrival + delays[job.name], job.described()) for job in mix.jobs]
    return simulate(arrivals, {NODE: mix.budget}, Best(mix))


class TorchloaderRule:
    """What torchloader gives each job while jobs come and go. It knows the curves, which it would have to learn."""

    def __init__(self, budget: int) -> None:
        self._cluster = ClusterLoaders({NODE: budget})
        self._policy = Torchloader()

    def arrive(self, job: SharingJob) -> dict[str, int]:
        self._cluster.put(job.described())
        return self._decide()

    def leave(self, job: SharingJob) -> dict[str, int]:
        self._cluster.remove(job.name)
        return self._decide()

    def _decide(self) -> dict[str, int]:
        self._policy.decide(self._cluster, (NODE,), 0.0)
        return self._cluster.allocation()
