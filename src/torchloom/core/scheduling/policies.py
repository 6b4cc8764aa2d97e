"""Rules that decide how many loaders each job has, with one signature, so that they can be compared.

A policy resizes jobs after an event. `nodes` are those on which something has changed. `ClusterLoaders.take_changes`
says what it did.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Protocol

from torchloom.core.scheduling.allocation import adjust, allocate, repair
from torchloom.core.scheduling.cluster_loaders import ClusterLoaders, Member
from torchloom.core.scheduling.stability import Group, MoveFilter

ENOUGH = 0.95
"""torchloader gives a job the loaders with which it reaches this share of its greatest throughput."""


class Policy(Protocol):
    @property
    def restarted(self) -> Collection[str]:
        """Jobs that the last decision restarts, because that is how this policy resizes them."""

    def decide(self, cluster: ClusterLoaders, nodes: Collection[str], now: float, /) -> None: ...


@dataclass(slots=True)
class Ours:
    """Around the event, what gains most; what is not worth a move is taken back."""

    restarted: ClassVar[Collection[str]] = ()
    is_drift: bool = False
    """Whether nothing but measurements has changed since the last decision."""
    filter: MoveFilter = field(default_factory=MoveFilter)
    groups: list[Group] = field(default_factory=list)
    """Of the last decision, with the reasons."""

    def decide(self, cluster: ClusterLoaders, nodes: Collection[str], now: float, /) -> None:
        self._decide(cluster, nodes, now, everything=False)

    def decide_all(self, cluster: ClusterLoaders, now: float) -> None:
        """From scratch: what `decide` misses, because it looks around one event at a time."""
        self._decide(cluster, cluster.budgets, now, everything=True)

    def _decide(self, cluster: ClusterLoaders, nodes: Collection[str], now: float, *, everything: bool) -> None:
        earlier = cluster.take_changes()
        repair(cluster, nodes)
        forced = cluster.take_changes()
        if everything:
            allocate(cluster)
        else:
            adjust(cluster, nodes)
        self.groups = self.filter.review(cluster, cluster.take_changes(), now, is_drift=self.is_drift)
        cluster.take_changes()
        for changes in (earlier, forced, *(group.changes for group in self.groups if group.verdict == "moves")):
            cluster.note_before(changes)


class Even:
    """The loaders of a node are divided evenly among the ranks on it; the rank with the fewest decides for its job."""

    restarted: ClassVar[Collection[str]] = ()

    def decide(self, cluster: ClusterLoaders, nodes: Collection[str], _now: float, /) -> None:
        members = cluster.around(nodes)
        ranks = _totals(cluster, members, {})
        _assign(
            cluster, members, [min(cluster.budgets[node] // ranks[node] for node, _ in each.demand) for each in members]
        )


class Requested:
    """Each job has what it requested, or as much of it as fits when it arrives."""

    restarted: ClassVar[Collection[str]] = ()

    def decide(self, cluster: ClusterLoaders, nodes: Collection[str], _now: float, /) -> None:
        repair(cluster, nodes)
        for member in cluster.around(nodes):
            _grow(cluster, member, member.job.requested)


@dataclass(slots=True)
class Torchloader:
    """torchloader's rule: in the order of arrival, each job gets what its prediction says is enough.

    Approximated, because its code is not part of this project: enough is `ENOUGH` of the throughput with the greatest
    number, by our curves instead of its two offline regressions; every rank has one loader before any has two; the
    budget is that of the whole cluster. The rule can thus exceed the budget of a node. Its loaders then share the
    cores, which is modelled as that proportion of them, rounded down.
    """

    restarted: set[str] = field(default_factory=set)
    _enough: dict[str, int] = field(default_factory=dict)
    _granted: dict[str, int] = field(default_factory=dict)
    """More than one."""

    def decide(self, cluster: ClusterLoaders, nodes: Collection[str], _now: float, /) -> None:
        for member in cluster.around(nodes):
            self._enough[member.job.name] = _enough(member)
        left = sum(cluster.budgets.values()) - sum(member.size for member in cluster.members.values())
        granted: dict[str, int] = {}
        for name, member in cluster.members.items():
            if left <= 0:
                break
            more = min(self._enough[name] - 1, left // member.size)
            left -= more * member.size
            if more:
                granted[name] = 1 + more
        names = (self._granted.keys() | granted.keys()) & cluster.members.keys()
        self.restarted = {name for name in names if granted.get(name) != self._granted.get(name)}
        self._granted = granted
        members = cluster.around(
            {*nodes, *(node for name in self.restarted for node in cluster.members[name].job.ranks)}
        )
        wanted = _totals(cluster, members, granted)
        _assign(
            cluster,
            members,
            [
                min(
                    granted.get(member.job.name, 1) * min(wanted[node], cluster.budgets[node]) // wanted[node]
                    for node, _ in member.demand
                )
                for member in members
            ],
        )


def _totals(cluster: ClusterLoaders, members: Iterable[Member], loaders: Mapping[str, int]) -> dict[str, int]:
    """Loaders on each node of these jobs, if the ranks of each job had this number, or one."""
    return {
        node: sum(
            ranks * loaders.get(name, 1)
            for name, member in cluster.on_node[node].items()
            for at, ranks in member.demand
            if at == node
        )
        for node in {node for member in members for node, _ in member.demand}
    }


def _assign(cluster: ClusterLoaders, members: Sequence[Member], targets: Sequence[int]) -> None:
    """Shrink first: with the targets together, no budget is exceeded."""
    for member, loaders in zip(members, targets, strict=True):
        cluster.resize(member, min(loaders, member.loaders))
    for member, loaders in zip(members, targets, strict=True):
        _grow(cluster, member, loaders)


def _grow(cluster: ClusterLoaders, member: Member, loaders: int) -> None:
    """To this number, or as far as there is room."""
    missing = min(loaders, member.cap) - member.loaders
    if missing > 0:
        cluster.resize(member, member.loaders + min(missing, max(cluster.room(member), 0)))


def _enough(member: Member) -> int:
    limit = ENOUGH * member.shares[-1]
    return next((loaders for loaders, share in enumerate(member.shares) if loaders and share >= limit), 1)


POLICIES: Mapping[str, Callable[[], Policy]] = {
    "ours": Ours,
    "even": Even,
    "requested": Requested,
    "torchloader": Torchloader,
}
