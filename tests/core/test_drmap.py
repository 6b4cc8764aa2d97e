"""DRMap: all directions always agree."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from torchloom.core.state.drmap import DRMap, Seat
from torchloom.protocol.ids import RankId, ReplicaId

devices = st.sampled_from(["GPU-1", "GPU-2", "CPU-a"])
replicas = st.builds(ReplicaId, st.sampled_from(["a", "b"]), st.sampled_from(["r0", "r1:uuid"]))
seats = st.builds(Seat, devices, replicas, st.one_of(st.none(), st.integers(0, 2)), st.sampled_from(["node1", "node2"]))
moves = st.lists(st.tuples(st.sampled_from(["add", "remove", "remove_rank"]), seats), max_size=40)


@given(moves)
def test_every_direction_tells_the_same_story(moves: list[tuple[str, Seat]]) -> None:
    drmap, truth = DRMap(), set[Seat]()
    for what, seat in moves:
        if what == "add":
            drmap.add(seat)
            truth.add(seat)
        elif what == "remove":
            drmap.remove(seat)
            truth.discard(seat)
        elif seat.rank is not None:
            drmap.remove_rank(RankId(*seat.replica, seat.rank))
            truth = {s for s in truth if (s.replica, s.rank) != (seat.replica, seat.rank)}
    assert set(drmap) == truth
    assert len(drmap) == len(truth)
    for device in ("GPU-1", "GPU-2", "CPU-a", "unknown"):
        assert set(drmap.replicas_on(device)) == {s.replica for s in truth if s.device == device}
        ranks = {RankId(*s.replica, s.rank) for s in truth if s.device == device and s.rank is not None}
        assert set(drmap.ranks_on(device)) == ranks
        for rank in ranks:
            assert device in drmap.devices_of_rank(rank)
        for replica in drmap.replicas_on(device):
            assert device in drmap.devices_of(replica)
    for replica in {s.replica for s in truth}:
        assert set(drmap.devices_of(replica)) == {s.device for s in truth if s.replica == replica}
        assert all(replica in drmap.replicas_on(device) for device in drmap.devices_of(replica))
        assert set(drmap.seats_of(replica)) == {s for s in truth if s.replica == replica}
    for node in ("node1", "node2"):
        assert set(drmap.on_node(node)) == {s for s in truth if s.node == node}


def test_a_device_shared_by_two_replicas_names_them_both() -> None:
    drmap = DRMap([Seat("GPU-1", ReplicaId("j", "a"), 0, "n"), Seat("GPU-1", ReplicaId("j", "b"), 0, "n")])
    assert drmap.replicas_on("GPU-1") == (("j", "a"), ("j", "b"))


def test_a_replica_on_two_devices_is_found_from_either() -> None:
    drmap = DRMap([Seat("GPU-1", ReplicaId("j", "a"), 0, "n"), Seat("GPU-2", ReplicaId("j", "a"), 1, "n")])
    assert drmap.devices_of(ReplicaId("j", "a")) == ("GPU-1", "GPU-2")
    assert drmap.replicas_on("GPU-2") == (("j", "a"),)


def test_an_emptied_map_keeps_no_keys() -> None:
    seat = Seat("GPU-1", ReplicaId("j", "a"), 0, "n")
    drmap = DRMap([seat])
    drmap.remove(seat)
    assert not drmap._by_device
    assert not drmap._by_replica
    assert not drmap._by_node
