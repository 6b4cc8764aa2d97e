"""Several say that a device is broken, each for a reason of his own; it works again when nobody is left."""

from __future__ import annotations

import pytest

from tests.core.loom import Loom, life
from torchloom.core.state.cluster import ClusterState
from torchloom.core.state.device_map import BLAMES_KEPT
from torchloom.protocol.facts import DeviceFailed, DeviceRecovered, Fact
from torchloom.protocol.node import NodeBeat
from torchloom.protocol.operator import Done, Fail, Recover
from torchloom.protocol.phrase import phrase

GPU = "GPU-1"


@pytest.fixture
def loom() -> Loom:
    loom = Loom()
    loom.join(devices=(GPU,))
    return loom


def fires(alert: str, began: float = 100.0, cause: str = "XID 79") -> Fact:
    return DeviceFailed(device=GPU, cause=cause, source="Alertmanager", alert=alert, began=began)


def over(alert: str, began: float = 100.0) -> Fact:
    return DeviceRecovered(device=GPU, source="Alertmanager", alert=alert, began=began)


def failed(loom: Loom) -> bool:
    """After a restart too."""
    again = loom.restarted()
    assert again.cluster.state() == loom.cluster.state()
    assert ClusterState(loom.cluster.settings, loom.cluster.state()).state() == loom.cluster.state()
    return loom.cluster.devices[GPU].failed


def test_an_alert_that_is_over_takes_back_what_it_said(loom: Loom) -> None:
    loom.tell(fires("a"))
    assert failed(loom)
    loom.tell(over("a"))
    assert not failed(loom)
    assert loom.open_incidents() == []


def test_one_alert_does_not_recover_what_another_still_holds_failed(loom: Loom) -> None:
    loom.tell(fires("a", cause="XID 79"))
    loom.tell(fires("b", cause="two bits flipped"))
    assert len(loom.cluster.incidents) == 1
    loom.tell(over("a"))
    assert failed(loom)
    assert loom.cluster.devices[GPU].cause == "two bits flipped"
    assert len(loom.open_incidents()) == 1
    loom.tell(over("b"))
    assert not failed(loom)


def test_an_alert_does_not_recover_what_a_person_or_an_agent_said_failed(loom: Loom) -> None:
    loom.ask(Fail(device=GPU, cause="it smells"))
    loom.tell(fires("a"))
    loom.tell(over("a"))
    assert failed(loom)
    loom.ask(Recover(device=GPU))
    loom.tell(DeviceFailed(device=GPU, source="agent n1"))
    loom.tell(fires("a", began=200.0))
    loom.tell(over("a", began=200.0))
    assert failed(loom)
    loom.tell(DeviceRecovered(device=GPU, source="agent n1"))
    assert not failed(loom)


def test_what_alertmanager_repeats_is_no_news(loom: Loom) -> None:
    loom.tell(fires("a"))
    assert loom.tell(fires("a")).records == ()
    loom.tell(over("a"))
    assert loom.tell(over("a")).records == ()


def test_a_person_overrules_every_alert_until_one_begins_anew(loom: Loom) -> None:
    loom.tell(fires("a"))
    loom.tell(fires("b"))
    answer = loom.ask(Recover(device=GPU, operator="ada")).answer
    assert isinstance(answer, Done)
    assert answer.text == phrase("device_works_again", device=GPU)
    assert loom.tell(fires("a")).records == ()
    assert not failed(loom)
    loom.tell(fires("a", began=500.0))
    assert failed(loom)
    loom.tell(over("a", began=500.0))
    assert not failed(loom)  # b fires still, and was overruled


def test_a_person_may_say_that_it_failed_after_he_said_that_it_works(loom: Loom) -> None:
    for _ in range(2):
        loom.ask(Fail(device=GPU))
        assert failed(loom)
        loom.ask(Recover(device=GPU))
        assert not failed(loom)


def test_the_late_end_of_an_alert_that_has_begun_again_changes_nothing(loom: Loom) -> None:
    loom.tell(fires("a", began=100.0))
    loom.tell(fires("a", began=300.0))
    loom.tell(over("a", began=100.0))
    assert failed(loom)
    loom.tell(over("a", began=300.0))
    assert not failed(loom)


def test_an_alert_that_fires_after_its_end_was_told_counts(loom: Loom) -> None:
    """So it is when Alertmanager was cut off from Prometheus for a while: the alert has never begun anew."""
    loom.tell(fires("a"))
    loom.tell(over("a"))
    loom.tell(fires("a"))
    assert failed(loom)


def test_the_end_of_an_alert_that_was_never_told_recovers_nothing(loom: Loom) -> None:
    assert loom.tell(over("a")).records == ()
    loom.ask(Fail(device=GPU))
    assert loom.tell(over("a")).records == ()
    assert failed(loom)


def test_who_blames_is_remembered_within_bounds(loom: Loom) -> None:
    for number in range(BLAMES_KEPT + 10):
        loom.tell(fires(f"a{number}"))
    assert len(loom.cluster.devices[GPU].blames) == BLAMES_KEPT


def test_a_device_that_only_an_agent_has_told_of_fails_and_recovers() -> None:
    loom = Loom()
    beat = NodeBeat(incarnation=life(1), host="10.0.0.7", cores=8, memory_mb=1000, devices=(GPU,))
    loom.cluster.runtime.hear_node("n7", beat, loom.now)
    assert loom.ask(Recover(device=GPU)).records == ()
    answer = loom.ask(Fail(device=GPU, cause="XID 79")).answer
    assert isinstance(answer, Done)
    assert answer.text == phrase(
        "device_fails", device=GPU, cause="XID 79", on_it=phrase("replicas_on_it", replicas=())
    )
    assert failed(loom)
    assert loom.cluster.devices[GPU].node == "n7"
    loom.ask(Recover(device=GPU))
    assert not failed(loom)
