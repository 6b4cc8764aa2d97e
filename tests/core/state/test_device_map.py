"""DRMap: all directions always agree."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from torchloom.core.state.device_map import DRMap
from torchloom.protocol.ids import RankId, ReplicaId
from torchloom.protocol.views import Assignment

devices = st.sampled_from(["GPU-1", "GPU-2", "CPU-a"])
replicas = st.builds(ReplicaId, st.sampled_from(["a", "b"]), st.sampled_from(["r0", "r1:uuid"]))
assignments = st.builds(
    Assignment,
    device=devices,
    replica=replicas,
    rank=st.one_of(st.none(), st.integers(0, 2)),
    node=st.sampled_from(["node1", "node2"]),
)
moves = st.lists(st.tuples(st.sampled_from(["add", "remove_rank"]), assignments), max_size=40)


@given(moves)
def test_every_direction_tells_the_same_story(moves: list[tuple[str, Assignment]]) -> None:
    drmap, truth = DRMap(), set[Assignment]()
    for what, assignment in moves:
        if what == "add":
            drmap.add(assignment)
            truth.add(assignment)
        elif assignment.rank is not None:
            drmap.remove_rank(RankId(*assignment.replica, assignment.rank))
            truth = {s for s in truth if (s.replica, s.rank) != (assignment.replica, assignment.rank)}
    assert set(drmap) == truth
    assert set(drmap.registered()) == {assignment for assignment in truth if assignment.rank is None}
    assert len(list(drmap)) == len(truth)
    for device in ("GPU-1", "GPU-2", "CPU-a", "unknown"):
        assert set(drmap.replicas_on(device)) == {a.replica for a in truth if a.device == device}
    for assignment in truth:
        assert assignment in drmap
        if assignment.rank is not None:
            rank = RankId(*assignment.replica, assignment.rank)
            mine = [a for a in truth if (a.replica, a.rank) == (rank.replica_id, rank.rank)]
            assert set(drmap.assignments_of(rank)) == set(mine)
            assert all(rank.replica_id in drmap.replicas_on(a.device) for a in drmap.assignments_of(rank))


def assign(device: str, replica: str, rank: int = 0) -> Assignment:
    return Assignment(device=device, replica=ReplicaId("j", replica), rank=rank, node="n")


def test_a_device_shared_by_two_replicas_names_them_both() -> None:
    drmap = DRMap([assign("GPU-1", "a"), assign("GPU-1", "b")])
    assert drmap.replicas_on("GPU-1") == (("j", "a"), ("j", "b"))


def test_a_replica_on_two_devices_is_found_from_either() -> None:
    drmap = DRMap([assign("GPU-1", "a", 0), assign("GPU-2", "a", 1)])
    assert [drmap.replicas_on(device) for device in ("GPU-1", "GPU-2")] == [(("j", "a"),), (("j", "a"),)]
    assert [a.device for a in drmap.assignments_of(RankId("j", "a", 1))] == ["GPU-2"]


def test_an_emptied_map_keeps_no_keys() -> None:
    drmap = DRMap([assign("GPU-1", "a")])
    drmap.remove_rank(RankId("j", "a", 0))
    assert not drmap._by_device
    assert not drmap._by_rank


def test_what_is_registered_on_several_nodes_is_always_listed_in_the_same_order() -> None:
    """States are compared as they list it."""
    nodes = [f"n{number}" for number in range(10)]
    here = [Assignment(device="GPU-1", replica=ReplicaId("j", "a"), node=node) for node in nodes]
    assert [a.node for a in DRMap(here).registered()] == nodes
