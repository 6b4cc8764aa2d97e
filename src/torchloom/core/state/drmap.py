"""DRMap: which devices a replica uses and which replicas use a device, many to many, all directions always agreeing.

Monitoring systems speak of devices, training speaks of replicas; this translates. The unit is a seat: one rank of a
replica on one device of a node, or a whole replica where the pair was registered by hand.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple, TypeVar

from torchloom.protocol.ids import RankId, ReplicaId

Key = TypeVar("Key")


class Seat(NamedTuple):
    device: str
    replica: ReplicaId
    rank: int | None
    """None: registered by hand for the replica as a whole."""
    node: str


class DRMap:
    def __init__(self, seats: Iterable[Seat] = ()) -> None:
        self._by_device: dict[str, set[Seat]] = {}
        self._by_replica: dict[ReplicaId, set[Seat]] = {}
        self._by_node: dict[str, set[Seat]] = {}
        self._by_rank: dict[tuple[ReplicaId, int | None], set[Seat]] = {}
        for seat in seats:
            self.add(seat)

    def add(self, seat: Seat) -> None:
        self._by_device.setdefault(seat.device, set()).add(seat)
        self._by_replica.setdefault(seat.replica, set()).add(seat)
        self._by_node.setdefault(seat.node, set()).add(seat)
        self._by_rank.setdefault((seat.replica, seat.rank), set()).add(seat)

    def remove(self, seat: Seat) -> None:
        _discard(self._by_device, seat.device, seat)
        _discard(self._by_replica, seat.replica, seat)
        _discard(self._by_node, seat.node, seat)
        _discard(self._by_rank, (seat.replica, seat.rank), seat)

    def remove_rank(self, rank: RankId) -> None:
        for seat in list(self._by_rank.get((rank.replica_id, rank.rank), ())):
            self.remove(seat)

    def replicas_on(self, device: str) -> tuple[ReplicaId, ...]:
        return tuple(sorted({seat.replica for seat in self._by_device.get(device, ())}))

    def ranks_on(self, device: str) -> tuple[RankId, ...]:
        return tuple(sorted(RankId(*s.replica, s.rank) for s in self._by_device.get(device, ()) if s.rank is not None))

    def devices_of(self, replica: ReplicaId) -> tuple[str, ...]:
        return tuple(sorted({seat.device for seat in self._by_replica.get(replica, ())}))

    def devices_of_rank(self, rank: RankId) -> tuple[str, ...]:
        return tuple(sorted({seat.device for seat in self._by_rank.get((rank.replica_id, rank.rank), ())}))

    def seats_of_rank(self, rank: RankId) -> tuple[Seat, ...]:
        return tuple(sorted(self._by_rank.get((rank.replica_id, rank.rank), ()), key=_order))

    def seats_of(self, replica: ReplicaId) -> tuple[Seat, ...]:
        return tuple(sorted(self._by_replica.get(replica, ()), key=_order))

    def on_node(self, node: str) -> tuple[Seat, ...]:
        return tuple(sorted(self._by_node.get(node, ()), key=_order))

    def __iter__(self) -> Iterator[Seat]:
        return iter(sorted((seat for seats in self._by_device.values() for seat in seats), key=_order))

    def __contains__(self, seat: Seat) -> bool:
        return seat in self._by_device.get(seat.device, ())

    def __len__(self) -> int:
        return sum(len(seats) for seats in self._by_device.values())


def _discard(index: dict[Key, set[Seat]], key: Key, seat: Seat) -> None:
    seats = index.get(key, set())
    seats.discard(seat)
    if not seats:
        index.pop(key, None)


def _order(seat: Seat) -> tuple[str, ReplicaId, int]:
    return seat.device, seat.replica, -1 if seat.rank is None else seat.rank
