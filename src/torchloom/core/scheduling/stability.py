"""Which changes of an allocation are worth a move: hysteresis and dwell, so that noise moves nothing.

Jobs that exchange loaders on some node are a group, and move together or not at all. After an event, a group moves if
the objective of its jobs rises by more than `LEAST_EVENT_GAIN`: a resize costs training about as much as a tenth of a
second. If nothing but measurements has changed since the last decision, the gain must be above `LEAST_DRIFT_GAIN` and
above the noise of its prediction, and none of the jobs moved a short time ago. Arrivals, departures and other budgets
cannot come from noise, and a new job has no good measurements yet.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from torchloom.core.scheduling.cluster_loaders import ClusterLoaders, Member, relative_gain

LEAST_EVENT_GAIN, LEAST_DRIFT_GAIN = 0.01, 0.03
"""Relative, of the objective of a group."""
ERRORS = 2.0
"""Standard errors of the prediction that a gain must exceed."""
DWELL_SECONDS = 20.0

Changes = Mapping[str, tuple[int, int]]
"""(loaders before, loaders now) by job."""


@dataclass(frozen=True, slots=True)
class Group:
    """Jobs that exchange loaders, and whether they may."""

    changes: Changes
    gain: float
    """Relative, of the objective of these jobs."""
    verdict: Literal["moves", "small_gain", "within_noise", "moved_recently"]


@dataclass(slots=True)
class MoveFilter:
    """Remembers when each job was moved."""

    _moved_at: dict[str, float] = field(default_factory=dict)

    def review(self, cluster: ClusterLoaders, changes: Changes, now: float, *, is_drift: bool) -> list[Group]:
        """Take back what is not worth a move; `is_drift`: only measurements have changed."""
        groups = [self._judge(cluster, group, now, is_drift) for group in _groups(cluster, changes)]
        for group in groups:
            if group.verdict == "moves":
                self.note_moved(group.changes, now)
            else:
                cluster.put_back(group.changes)
        return groups

    def note_moved(self, changes: Changes, now: float) -> None:
        self._moved_at.update(dict.fromkeys(changes, now))

    def forget(self, job: str) -> None:
        self._moved_at.pop(job, None)

    def _judge(self, cluster: ClusterLoaders, changes: Changes, now: float, is_drift: bool) -> Group:
        members = [(cluster.members[name], old, new) for name, (old, new) in changes.items()]
        before = [member.values[old] for member, old, _ in members]
        after = [member.values[new] for member, _, new in members]
        weight = sum(member.job.weight for member, _, _ in members)
        gain = relative_gain(cluster.objective, before, after, weight)
        if gain <= (LEAST_DRIFT_GAIN if is_drift else LEAST_EVENT_GAIN):
            return Group(changes, gain, "small_gain")
        if is_drift:
            noise = math.sqrt(sum(_error(member, old, new) ** 2 for member, old, new in members))
            if sum(after) - sum(before) <= ERRORS * noise:
                return Group(changes, gain, "within_noise")
            if any(now - self._moved_at.get(name, -math.inf) < DWELL_SECONDS for name in changes):
                return Group(changes, gain, "moved_recently")
        return Group(changes, gain, "moves")


def _error(member: Member, old: int, new: int) -> float:
    """The standard error of the difference between two values of a job."""
    difference = member.shares[new] - member.shares[old]
    slope = (member.values[new] - member.values[old]) / difference if difference else 0.0
    return slope * member.job.curve.share_error(old, new)


def _groups(cluster: ClusterLoaders, changes: Changes) -> list[Changes]:
    """The connected components of the jobs that change, where jobs on one node are connected."""
    on_node: dict[str, list[str]] = {}
    for name in changes:
        for node in cluster.members[name].job.ranks:
            on_node.setdefault(node, []).append(name)
    ahead = dict(changes)
    groups: list[Changes] = []
    while ahead:
        group, border = {}, [next(iter(ahead))]
        while border:
            name = border.pop()
            if (change := ahead.pop(name, None)) is not None:
                group[name] = change
                border += [other for node in cluster.members[name].job.ranks for other in on_node[node]]
        groups.append(group)
    return groups
