"""The device-replica map, both ways: which replicas sit on a device, which devices a replica has."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeVar

from torchloom.core.detect.hang import consecutive
from torchloom.protocol.ids import RankId, ReplicaId
from torchloom.protocol.views import Assignment, DeviceView
from torchloom.views.format.tables import Column, Screen, table
from torchloom.views.listings import state

Key = TypeVar("Key", str, ReplicaId)
Item = TypeVar("Item", str, ReplicaId)


def by_device(assignments: Iterable[Assignment]) -> dict[str, list[ReplicaId]]:
    return _grouped((assignment.device, assignment.replica) for assignment in assignments)


def by_replica(assignments: Iterable[Assignment]) -> dict[ReplicaId, list[str]]:
    return _grouped((assignment.replica, assignment.device) for assignment in assignments)


def _grouped(pairs: Iterable[tuple[Key, Item]]) -> dict[Key, list[Item]]:
    """Each item once, both keys and items sorted."""
    groups: dict[Key, list[Item]] = {}
    for key, item in sorted(set(pairs)):
        groups.setdefault(key, []).append(item)
    return groups


def chosen(
    assignments: Iterable[Assignment],
    *,
    device: str | None = None,
    replica: ReplicaId | None = None,
    node: str | None = None,
    rank: RankId | None = None,
) -> list[Assignment]:
    """The assignments that match everything asked for."""
    return [
        assignment
        for assignment in assignments
        if (device is None or assignment.device == device)
        and (replica is None or assignment.replica == replica)
        and (node is None or assignment.node == node)
        and (rank is None or (assignment.replica == rank.replica_id and assignment.rank == rank.rank))
    ]


def drmap(assignments: Sequence[Assignment], devices: Sequence[DeviceView], screen: Screen) -> list[str]:
    """Both directions as two tables."""
    if not assignments:
        return ["no device is registered for any replica"]
    return [*device_table(assignments, devices, screen), "", *replica_table(assignments, screen)]


def device_table(assignments: Sequence[Assignment], devices: Sequence[DeviceView], screen: Screen) -> list[str]:
    nodes = {a.device: a.node for a in reversed(assignments)} | {view.device: view.node for view in devices}
    health = {view.device: state(view.health) for view in devices}
    replicas = by_device(assignments)
    columns: list[Column[str]] = [
        Column("DEVICE", lambda device: device, shrinks=True),
        Column("NODE", nodes.get, shrinks=True),
        Column("HEALTH", health.get),
        Column("REPLICAS", lambda device: str(len(replicas[device])), right=True),
        Column("JOB/REPLICA", lambda device: ", ".join(map(str, replicas[device])), shrinks=True),
    ]
    return table(columns, replicas, screen)


def replica_table(assignments: Sequence[Assignment], screen: Screen) -> list[str]:
    devices = by_replica(assignments)

    def ranks(replica: ReplicaId) -> str:
        return spans({a.rank for a in assignments if a.replica == replica and a.rank is not None}) or "by hand"

    columns: list[Column[ReplicaId]] = [
        Column("JOB", lambda replica: replica.job, shrinks=True),
        Column("REPLICA", lambda replica: replica.replica, shrinks=True),
        Column("RANKS", ranks, right=True),
        Column("DEVICES", lambda replica: ", ".join(devices[replica]), shrinks=True),
    ]
    return table(columns, devices, screen)


def spans(numbers: Iterable[int]) -> str:
    """`0-3,7` for 0 1 2 3 7."""
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in consecutive(numbers))
