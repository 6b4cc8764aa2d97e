"""The device-replica map, both ways: which replicas sit on a device, which devices a replica has."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeVar

from torchloom.protocol.ids import RankId, ReplicaId
from torchloom.protocol.views import Assignment, DeviceView
from torchloom.views.format.numbers import ABSENT
from torchloom.views.format.tables import Cell, Column, Row, Screen, table
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
    known = {view.device: view for view in devices}
    columns = [
        Column("DEVICE", shrinks=True), Column("NODE", shrinks=True), Column("HEALTH"),
        Column("REPLICAS", right=True), Column("JOB/REPLICA", shrinks=True),
    ]  # fmt: skip
    rows: list[Row] = []
    for device, replicas in by_device(assignments).items():
        view = known.get(device)
        node = view.node if view else next((s.node for s in assignments if s.device == device), "")
        health = state(view.health) if view else Cell(ABSENT)
        rows.append([device, node or ABSENT, health, str(len(replicas)), ", ".join(map(str, replicas))])
    return table(columns, rows, screen)


def replica_table(assignments: Sequence[Assignment], screen: Screen) -> list[str]:
    columns = [
        Column("JOB", shrinks=True), Column("REPLICA", shrinks=True), Column("RANKS", right=True),
        Column("DEVICES", shrinks=True),
    ]  # fmt: skip
    rows: list[Row] = []
    for replica, devices in by_replica(assignments).items():
        ranks = sorted({s.rank for s in assignments if s.replica == replica and s.rank is not None})
        rows.append([replica.job, replica.replica, spans(ranks) or "by hand", ", ".join(devices)])
    return table(columns, rows, screen)


def spans(numbers: Sequence[int]) -> str:
    """`0-3,7` for 0 1 2 3 7."""
    runs: list[list[int]] = []
    for n in numbers:
        if runs and n == runs[-1][1] + 1:
            runs[-1][1] = n
        else:
            runs.append([n, n])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
