"""The device-replica map reads the same both ways."""

from __future__ import annotations

from tests.views.samples import assignment, device
from torchloom.protocol.ids import RankId, ReplicaId
from torchloom.views.device_map import by_device, by_replica, chosen, drmap, spans
from torchloom.views.format.tables import Screen

SEATS = [
    assignment("GPU-1", "mnist", "hi", 0),
    assignment("GPU-1", "mnist", "ho", 0),
    assignment("GPU-2", "mnist", "hi", 1, node="n2"),
    assignment("GPU-1", "mnist", "hi", 3),
    assignment("GPU-3", "other", "hi", None),
]


def test_both_directions() -> None:
    assert by_device(SEATS) == {
        "GPU-1": [ReplicaId("mnist", "hi"), ReplicaId("mnist", "ho")],
        "GPU-2": [ReplicaId("mnist", "hi")],
        "GPU-3": [ReplicaId("other", "hi")],
    }
    assert by_replica(SEATS)[ReplicaId("mnist", "hi")] == ["GPU-1", "GPU-2"]


def test_choosing_combines() -> None:
    assert [s.rank for s in chosen(SEATS, device="GPU-1", replica=ReplicaId("mnist", "hi"))] == [0, 3]
    assert [s.device for s in chosen(SEATS, node="n2")] == ["GPU-2"]
    assert [s.device for s in chosen(SEATS, rank=RankId("mnist", "hi", 1))] == ["GPU-2"]
    assert chosen(SEATS, rank=RankId("other", "hi", 0)) == []


def test_two_tables() -> None:
    lines = drmap(SEATS, [device("GPU-1", health="failed"), device("GPU-2", node="n2")], Screen())
    assert lines[1].split() == ["GPU-1", "n1", "failed", "2", "mnist/hi,", "mnist/ho"]
    assert "" in lines
    replicas = lines[lines.index("") + 1 :]
    assert replicas[1].split() == ["mnist", "hi", "0-1,3", "GPU-1,", "GPU-2"]
    assert "by hand" in replicas[3]
    assert drmap([], [], Screen()) == ["no device is registered for any replica"]


def test_spans() -> None:
    assert spans([0, 1, 2, 3, 7]) == "0-3,7"
    assert spans([]) == ""
