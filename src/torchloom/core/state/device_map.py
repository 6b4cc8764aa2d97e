"""Devices, the sources that report them failed, and the DRMap: which replicas use a device, which devices a rank uses.

The DRMap is many to many, and both directions always agree. Monitoring systems report devices, training consists of
replicas; it translates. The unit is an assignment: one rank of a replica on one device of a node, or a whole replica
where an operator registered the pair.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain

import msgspec
from msgspec.structs import replace

from torchloom.protocol import records
from torchloom.protocol.ids import RankId, ReplicaId
from torchloom.protocol.phrase import Prose
from torchloom.protocol.views import Assignment

BLAMES_KEPT = 64
"""Failure reports of one device; beyond, the oldest is forgotten."""


class Device(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    node: str
    failed: bool = False
    since: float = 0.0
    cause: Prose = ""
    incident: str = ""
    blames: tuple[records.Blame, ...] = ()
    """All failure reports, also those that an operator has overruled."""


class Devices(dict[str, Device]):
    """By id."""

    def add(self, id: str, node: str, at: float) -> None:
        """Add a device that is not recorded yet; otherwise record that it is on another node now."""
        if id not in self:
            self[id] = Device(id=id, node=node, since=at)
        elif node and self[id].node != node:
            self[id] = replace(self[id], node=node)

    def fold(self, record: records.DeviceRecord, at: float) -> None:
        id = record.device
        if isinstance(record, records.DeviceRegistered | records.DeviceBlamed):
            self.add(id, record.node, at)
        device = self[id]
        match record:
            case records.DeviceBlamed(blame=blame):
                others = tuple(other for other in device.blames if other.by != blame.by)
                self[id] = replace(device, blames=(*others, blame)[-BLAMES_KEPT:])
            case records.DeviceCleared(by=by):
                left = tuple(blame for blame in device.blames if blame.by != by)
                cause = next((blame.cause for blame in left if device.failed and not blame.overruled), device.cause)
                self[id] = replace(device, blames=left, cause=cause)
            case records.DeviceMarkedFailed(cause=cause):
                self[id] = replace(device, failed=True, since=at, cause=cause)
            case records.DeviceMarkedRecovered():
                kept = tuple(replace(blame, overruled=True) for blame in device.blames if blame.alert)
                self[id] = replace(device, failed=False, since=at, cause="", incident="", blames=kept)


class DRMap:
    def __init__(self, assignments: Iterable[Assignment] = ()) -> None:
        self._by_device: dict[str, set[Assignment]] = {}
        self._by_rank: dict[tuple[ReplicaId, int | None], set[Assignment]] = {}
        for assignment in assignments:
            self.add(assignment)

    def add(self, assignment: Assignment) -> None:
        self._by_device.setdefault(assignment.device, set()).add(assignment)
        self._by_rank.setdefault((assignment.replica, assignment.rank), set()).add(assignment)

    def remove_rank(self, rank: RankId) -> None:
        for assignment in self._by_rank.pop((rank.replica_id, rank.rank), ()):
            others = self._by_device[assignment.device]
            others.remove(assignment)
            if not others:
                del self._by_device[assignment.device]

    def registered(self) -> list[Assignment]:
        """Those of whole replicas, which operators registered."""
        by_hand = (assignments for (_, rank), assignments in self._by_rank.items() if rank is None)
        return sorted(chain.from_iterable(by_hand), key=_order)

    def replicas_on(self, device: str) -> tuple[ReplicaId, ...]:
        return tuple(sorted({assignment.replica for assignment in self._by_device.get(device, ())}))

    def assignments_of(self, rank: RankId) -> list[Assignment]:
        return sorted(self._by_rank.get((rank.replica_id, rank.rank), ()), key=_order)

    def __iter__(self) -> Iterator[Assignment]:
        return iter(sorted((a for assignments in self._by_device.values() for a in assignments), key=_order))

    def __contains__(self, assignment: Assignment) -> bool:
        return assignment in self._by_device.get(assignment.device, ())


def _order(assignment: Assignment) -> tuple[str, ReplicaId, int, str]:
    """Of all that can differ: an operator may have registered a replica for a device on two nodes."""
    return assignment.device, assignment.replica, -1 if assignment.rank is None else assignment.rank, assignment.node
