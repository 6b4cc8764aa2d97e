"""DRMap: which replicas use a device and which devices a rank uses, many to many, both directions always agreeing.

Monitoring systems report devices, training consists of replicas; this translates. The unit is an assignment: one rank
of a replica on one device of a node, or a whole replica where an operator registered the pair.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeVar

from torchloom.protocol.ids import RankId, ReplicaId
from torchloom.protocol.views import Assignment

Key = TypeVar("Key")


class DRMap:
    def __init__(self, assignments: Iterable[Assignment] = ()) -> None:
        self._by_device: dict[str, set[Assignment]] = {}
        self._by_rank: dict[tuple[ReplicaId, int | None], set[Assignment]] = {}
        for assignment in assignments:
            self.add(assignment)

    def add(self, assignment: Assignment) -> None:
        self._by_device.setdefault(assignment.device, set()).add(assignment)
        self._by_rank.setdefault((assignment.replica, assignment.rank), set()).add(assignment)

    def remove(self, assignment: Assignment) -> None:
        _discard(self._by_device, assignment.device, assignment)
        _discard(self._by_rank, (assignment.replica, assignment.rank), assignment)

    def remove_rank(self, rank: RankId) -> None:
        for assignment in self.assignments_of(rank):
            self.remove(assignment)

    def replicas_on(self, device: str) -> tuple[ReplicaId, ...]:
        return tuple(sorted({assignment.replica for assignment in self._by_device.get(device, ())}))

    def assignments_of(self, rank: RankId) -> list[Assignment]:
        return sorted(self._by_rank.get((rank.replica_id, rank.rank), ()), key=_order)

    def __iter__(self) -> Iterator[Assignment]:
        return iter(sorted((a for assignments in self._by_device.values() for a in assignments), key=_order))

    def __contains__(self, assignment: Assignment) -> bool:
        return assignment in self._by_device.get(assignment.device, ())


def _order(assignment: Assignment) -> tuple[str, ReplicaId, int]:
    return assignment.device, assignment.replica, -1 if assignment.rank is None else assignment.rank


def _discard(index: dict[Key, set[Assignment]], key: Key, assignment: Assignment) -> None:
    assignments = index.get(key, set())
    assignments.discard(assignment)
    if not assignments:
        index.pop(key, None)
