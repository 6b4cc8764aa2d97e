"""Which devices an alert about a machine means."""

from __future__ import annotations

import pytest

from tests.core.loom import Loom, life
from torchloom.core.devices.alert_targets import AlertTargets, devices_blamed_by
from torchloom.protocol.facts import DeviceFailed
from torchloom.protocol.ids import RankId
from torchloom.protocol.node import NodeBeat


@pytest.fixture
def loom() -> Loom:
    """node7 has a rank and an idle GPU that its agent told of; n8.example.org has a rank alone."""
    loom = Loom()
    loom.join(RankId("j", "a", 0), node="node7", devices=("GPU-1",))
    loom.join(RankId("j", "b", 0), node="n8.example.org", devices=("GPU-3",))
    beat = NodeBeat(incarnation=life(1), host="10.0.0.7", cores=8, memory_mb=1000, devices=("GPU-1", "GPU-2"))
    loom.cluster.runtime.hear_node("node7", beat, loom.now)
    return loom


@pytest.mark.parametrize(
    ("names", "devices"),
    [
        (("node7",), ("GPU-1", "GPU-2")),
        (("NODE7.example.org",), ("GPU-1", "GPU-2")),
        (("10.0.0.7:9400",), ("GPU-1", "GPU-2")),
        (("nobody", "node7:9400"), ("GPU-1", "GPU-2")),
        (("n8",), ("GPU-3",)),
        (("n8-example-org",), ("GPU-3",)),
        (("n8.example.org:9400",), ("GPU-3",)),
        (("n8.example.com",), ()),
        (("node",), ()),
        (("10.0.0.8",), ()),
        (("[::1]:9400", "::1", ""), ()),
        ((), ()),
    ],
)
def test_a_machine_is_known_by_several_names(loom: Loom, names: tuple[str, ...], devices: tuple[str, ...]) -> None:
    assert AlertTargets(loom.cluster).devices(names) == devices


def test_a_part_is_meant_only_if_it_is_known_by_that_name(loom: Loom) -> None:
    hosts = AlertTargets(loom.cluster)
    assert hosts.named("GPU-1") == ("GPU-1",)
    assert hosts.named("GPU-2") == ("GPU-2",)
    assert hosts.named("nvidia0") == ()
    assert hosts.named("") == ()


def test_what_an_alert_has_on_its_conscience(loom: Loom) -> None:
    loom.tell(DeviceFailed(device="GPU-1", alert="a", began=1.0))
    loom.tell(DeviceFailed(device="GPU-2", alert="a", began=1.0))
    assert devices_blamed_by(loom.cluster, ["a", "b"]) == {"a": ["GPU-1", "GPU-2"], "b": []}
