"""The loader budgets of nodes, the jobs on them, and the number of loaders that each job has.

Every rank of a job has the same number of loaders, so one more for a job takes as many from the budget of a node as the
job has ranks there. Nobody gives more than a budget has. A budget that becomes smaller can be exceeded until
`allocation.repair` takes back what was given.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from torchloom.core.scheduling.throughput_model import PRIOR, Curve

MOST_LOADERS = 64
LEAST_GAIN = 0.0005
"""A loader that adds less than this to T/G is not given: it costs memory and gains nothing that can be measured."""
POWER = 8
"""Of the finishing time in the makespan objective: the longest of the jobs decides, and ties still have a slope."""
TIE = 1e-9
"""Of T/G in the makespan objective: loaders that shorten nothing still go where they help."""


class Objective(enum.Enum):
    """What an allocation maximises: the sum over jobs of a value that grows with T/G."""

    SHARE = "share"
    """weight · T/G: how fast each job trains, compared with never waiting for data."""
    SAMPLES = "samples"
    """weight · samples/s: favours jobs whose samples are cheap."""
    LOG = "log"
    """weight · log T/G: proportional fairness, no job is starved."""
    MAKESPAN = "makespan"
    """The time until the last job has finished; a sum of powers stands for the maximum. Needs `Job.remaining`."""


@dataclass(frozen=True, slots=True)
class Job:
    name: str
    ranks: Mapping[str, int]
    """On each node."""
    curve: Curve = PRIOR
    """Of one rank."""
    least: int = 0
    """Loaders of each rank; with 0, training may have to load itself."""
    most: int = MOST_LOADERS
    """A job whose number cannot change has this equal to `least`."""
    weight: float = 1.0
    requested: int = 0
    """Loaders of each rank in the job's own configuration; of interest to other policies only."""
    remaining: float | None = None
    """Samples until it has finished, of all ranks."""

    @property
    def size(self) -> int:
        return sum(self.ranks.values())


@dataclass(frozen=True, slots=True)
class Scores:
    """All objectives for one allocation."""

    share: float
    samples: float
    log: float
    makespan: float
    """Seconds until the last of the jobs has finished of which `remaining` is known."""


@dataclass(frozen=True, slots=True)
class Shortage:
    """The minimum of a job does not fit into the budget of a node."""

    job: str
    node: str
    least: int
    loaders: int
    """Of each rank, that it has instead."""
    budget: int
    """Of the node."""


@dataclass(slots=True)
class Member:
    """A job with its loaders. `values[w]` is what the objective gives for w loaders a rank."""

    job: Job
    demand: tuple[tuple[str, int], ...]
    """Loaders of each node that one loader a rank costs."""
    shares: list[float]
    values: list[float]
    jump: int
    """The number of loaders with the best gain for each, counted from 0: the first alone often gains less."""
    size: int
    """Ranks."""
    loaders: int = 0

    @property
    def cap(self) -> int:
        """More gain nothing."""
        return len(self.values) - 1

    @property
    def value(self) -> float:
        return self.values[self.loaders]


@dataclass(slots=True)
class ClusterLoaders:
    budgets: dict[str, int]
    objective: Objective = Objective.SHARE
    members: dict[str, Member] = field(default_factory=dict)
    """In the order of arrival."""
    free: dict[str, int] = field(init=False)
    on_node: dict[str, dict[str, Member]] = field(init=False)
    _before: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.budgets = dict(self.budgets)
        self.free = dict(self.budgets)
        self.on_node = {node: {} for node in self.budgets}

    def put(self, job: Job, present: int = 0) -> None:
        """Add a job with its minimum, or as much of it as fits; or replace what is known of it, keeping its loaders.

        `present`: what a new job has already; its table of values does not end below.
        """
        previous = self.members.get(job.name)
        loaders = previous.loaders if previous is not None else 0
        for node in job.ranks:
            if node not in self.budgets:
                self.set_budget(node, 0)
        member = _member(job, self.objective, max(loaders, present))
        if previous is not None and previous.demand == member.demand:
            member.loaders = loaders
            loaders = min(loaders, member.cap)
        elif previous is not None:
            self._detach(previous)
        self.members[job.name] = member
        for node, _ in member.demand:
            self.on_node[node][job.name] = member
        missing = max(loaders, min(job.least, member.cap)) - member.loaders
        self.resize(member, member.loaders + min(missing, max(self.room(member), 0)))

    def remove(self, name: str) -> None:
        self._detach(self.members.pop(name))
        self._before.pop(name, None)

    def set_budget(self, node: str, loaders: int) -> None:
        self.free[node] = self.free.get(node, 0) + loaders - self.budgets.get(node, 0)
        self.budgets[node] = loaders
        self.on_node.setdefault(node, {})

    def resize(self, member: Member, loaders: int) -> None:
        name, more = member.job.name, loaders - member.loaders
        if not more:
            return
        self._before.setdefault(name, member.loaders)
        for node, ranks in member.demand:
            self.free[node] -= more * ranks
        member.loaders = loaders

    def room(self, member: Member) -> int:
        """Loaders that each of its ranks could get in addition."""
        return min(self.free[node] // ranks for node, ranks in member.demand)

    def take_changes(self) -> dict[str, tuple[int, int]]:
        """(before, now) of each job whose number of loaders has changed since the last call; a new job had 0."""
        before, self._before = self._before, {}
        return {
            name: (loaders, now) for name, loaders in before.items() if (now := self.members[name].loaders) != loaders
        }

    def note_before(self, changes: Mapping[str, tuple[int, int]]) -> None:
        """Report these changes again with the next ones, unless there is an earlier report of the same job."""
        for name, (before, _) in changes.items():
            self._before.setdefault(name, before)

    def put_back(self, changes: Mapping[str, tuple[int, int]]) -> None:
        """Undo changes. The caller makes sure that the old numbers fit."""
        for name, (before, _) in changes.items():
            self.resize(self.members[name], before)

    def around(self, nodes: Collection[str]) -> list[Member]:
        """The jobs with ranks on some of these nodes, in the order in which the nodes have them."""
        return list({name: member for node in nodes for name, member in self.on_node.get(node, {}).items()}.values())

    def allocation(self) -> dict[str, int]:
        return {name: member.loaders for name, member in self.members.items()}

    def value(self) -> float:
        return sum(member.value for member in self.members.values())

    def shortages(self) -> Iterator[Shortage]:
        for name, member in self.members.items():
            least = min(member.job.least, member.cap)
            if member.loaders < least:
                node = min(member.demand, key=lambda each: self.free[each[0]] / each[1])[0]
                yield Shortage(name, node, least, member.loaders, self.budgets[node])

    def scores(self) -> Scores:
        jobs = [(member.job, member.shares[member.loaders]) for member in self.members.values()]
        values = {
            objective: sum(_value(objective, job, share) for job, share in jobs)
            for objective in (Objective.SHARE, Objective.SAMPLES, Objective.LOG)
        }
        last = max((_seconds(job, share) for job, share in jobs), default=0.0)
        return Scores(values[Objective.SHARE], values[Objective.SAMPLES], values[Objective.LOG], last)

    def _detach(self, member: Member) -> None:
        for node, ranks in member.demand:
            self.free[node] += member.loaders * ranks
            del self.on_node[node][member.job.name]


def relative_gain(objective: Objective, before: Iterable[float], now: Iterable[float], weight: float) -> float:
    """How much better the summed values of some jobs became, as a share of what they were."""
    old, new = sum(before), sum(now)
    match objective:
        case Objective.LOG:
            return (new - old) / weight
        case Objective.MAKESPAN:
            return float(1 - (new / old) ** (1 / POWER)) if old < 0 and new < 0 else 0.0
        case _:
            return new / old - 1 if old > 0 else 0.0


def _member(job: Job, objective: Objective, loaders: int) -> Member:
    """The table ends where a loader gains nothing, but not before the minimum and what the job has."""
    curve, weight = job.curve, job.weight * job.size * job.curve.ceiling
    shares = _shares(curve, min(job.most, max(job.least, loaders)), job.most)
    match objective:
        case Objective.SHARE:
            values = [job.weight * share for share in shares]
        case Objective.SAMPLES:
            values = [weight * share for share in shares]
        case _:
            values = [_value(objective, job, share) for share in shares]
    jump = 1
    while jump + 1 < len(values) and (values[jump + 1] - values[0]) * jump > (values[jump] - values[0]) * (jump + 1):
        jump += 1
    return Member(
        job, tuple(sorted((node, ranks) for node, ranks in job.ranks.items() if ranks)), shares, values, jump, job.size
    )


def _shares(curve: Curve, least: int, most: int) -> list[float]:
    """`curve.share` of 0, 1, 2 … loaders; the loop of a decision from scratch, hence written out."""
    ratio, contention = curve.ceiling / curve.rate, curve.contention
    shares = [1 / (1 + ratio)]
    for loaders in range(1, most + 1):
        share = (1 + (ratio * (1 + contention * (loaders - 1)) / loaders) ** 4) ** -0.25
        if loaders > least and loaders > 2 and share - shares[-1] < LEAST_GAIN:
            break
        shares.append(share)
    return shares


def _value(objective: Objective, job: Job, share: float) -> float:
    match objective:
        case Objective.SHARE:
            return job.weight * share
        case Objective.SAMPLES:
            return job.weight * job.size * job.curve.ceiling * share
        case Objective.LOG:
            return job.weight * math.log(share)
        case Objective.MAKESPAN:
            return TIE * share - (_seconds(job, share) / 3600) ** POWER


def _seconds(job: Job, share: float) -> float:
    """Until the job has finished at this speed."""
    return job.remaining / (job.size * job.curve.ceiling * share) if job.remaining else 0.0
