"""What devices say of themselves, from an agent's beat to a viewer; and what does not follow from it."""

from __future__ import annotations

from msgspec.structs import replace

from tests.core.site import Site
from torchloom.core.state.runtime import NODE_SILENCE
from torchloom.protocol.facts import DeviceFailed
from torchloom.protocol.node import NodeBeat, Pressure, Reading
from torchloom.protocol.views import DeviceView, PlaneView, QueryCluster, QueryRuns
from torchloom.views.cluster_summary import READINGS_SHOWN, picture, runs

COLD, HOT = Reading(device="GPU-a", temperature=40.0), Reading(device="GPU-a", temperature=80.0)


def hear(site: Site, **told: object) -> bool:
    beat: NodeBeat = replace(site.agents["n1"].beat(), **told)
    return site.loom.cluster.runtime.hear_node("n1", beat, site.loom.now)


def devices(site: Site, offset: int = 0, readings: bool = True) -> dict[str, DeviceView]:
    plane = PlaneView(weaver="w", term=1, began=0.0, now=site.loom.now, log_seq=1, version="1")
    view = picture(site.loom.cluster, plane, QueryCluster(readings=readings, offset=offset))
    return {device.device: device for device in view.devices}


def test_a_device_that_nobody_uses_is_seen_with_what_it_says() -> None:
    site = Site(devices=("GPU-a", "GPU-b"))
    hear(site, readings=(HOT,))
    found = devices(site)
    assert [(view.device, view.node, view.health) for view in found.values()] == [
        ("GPU-a", "n1", "ok"),
        ("GPU-b", "n1", "ok"),
    ]
    assert (found["GPU-a"].reading, found["GPU-b"].reading) == (HOT, None)
    assert devices(site, offset=1) == {}
    site.loom.tell(DeviceFailed(device="GPU-b", cause="XID 79"))
    assert devices(site)["GPU-b"].health == "failed"


def test_readings_are_shown_only_to_who_wants_them_and_while_the_agent_speaks() -> None:
    site = Site(devices=("GPU-a",))
    hear(site, readings=(HOT,))
    assert devices(site, readings=False)["GPU-a"].reading is None
    site.loom.now += NODE_SILENCE
    assert devices(site)["GPU-a"].reading is None


def test_nodes_show_their_readings_unless_they_are_too_many_for_a_message() -> None:
    site = Site(devices=("GPU-a",))
    hear(site, readings=(HOT,), pressure=Pressure(cpu=12.0))
    (node,) = runs(site.loom.cluster, QueryRuns(), site.loom.now).nodes
    assert (node.beat.readings, node.beat.pressure) == ((HOT,), Pressure(cpu=12.0))
    hear(site, readings=(HOT,) * (READINGS_SHOWN + 1))
    (node,) = runs(site.loom.cluster, QueryRuns(), site.loom.now).nodes
    assert node.beat.readings == ()


def test_other_readings_are_no_news_that_anything_is_decided_on() -> None:
    site = Site(devices=("GPU-a",))
    hear(site, readings=(COLD,), pressure=Pressure(cpu=1.0))
    assert not hear(site, readings=(HOT,), pressure=Pressure(cpu=2.0))
    assert hear(site, readings=(HOT,), leaving=True)
