"""Devices that fail, and what stands on them."""

from __future__ import annotations

from tests.core.loom import HI, Loom
from torchloom.messages import DeviceFailed, Done, Fail, No, RankId, Recover, Register


def test_a_device_shared_by_two_replicas_fails_them_both() -> None:
    loom = Loom()
    loom.join(RankId("j", "a", 0), devices=("GPU-1",))
    loom.join(RankId("j", "b", 0), devices=("GPU-1",))
    answer = loom.ask(Fail(device="GPU-1", cause="XID 79")).answer
    assert isinstance(answer, Done)
    assert answer.replicas == (("j", "a"), ("j", "b"))
    assert loom.open_incidents() == ["device GPU-1 failed: XID 79"]


def test_an_unknown_device_is_said_to_be_unknown_and_changes_nothing() -> None:
    loom = Loom()
    loom.join(devices=("GPU-1234",))
    before = loom.fabric.state()
    decision = loom.ask(Fail(device="GPU-1243"))
    assert isinstance(decision.answer, No)
    assert "unknown" in decision.answer.why
    assert decision.answer.hint == "did you mean GPU-1234?"
    assert decision.records == ()
    assert loom.fabric.state() == before


def test_a_device_that_failed_already_is_one_incident() -> None:
    loom = Loom()
    loom.join()
    loom.ask(Fail(device="GPU-1"))
    assert loom.tell(DeviceFailed(device="GPU-1")).records == ()
    assert len(loom.fabric.incidents) == 1


def test_a_recovered_device_closes_its_incident() -> None:
    loom = Loom()
    loom.join()
    loom.ask(Fail(device="GPU-1"))
    loom.ask(Recover(device="GPU-1", operator="ada"))
    assert loom.open_incidents() == []
    assert not loom.fabric.devices["GPU-1"].failed
    assert loom.fabric.devices["GPU-1"].incident == ""


def test_a_device_registered_by_hand_is_on_the_map_and_survives() -> None:
    loom = Loom()
    loom.ask(Register(device="GPU-9", job="manual", replica="hi"))
    assert loom.fabric.drmap.replicas_on("GPU-9") == (("manual", "hi"),)
    assert loom.ask(Register(device="GPU-9", job="manual", replica="hi")).records == ()
    assert loom.restarted().fabric.drmap.replicas_on("GPU-9") == (("manual", "hi"),)


def test_a_new_life_on_another_device_leaves_the_old_one() -> None:
    loom = Loom()
    loom.join(number=1, devices=("GPU-1", "GPU-2"))
    loom.join(number=2, devices=("GPU-3",))
    assert loom.fabric.drmap.devices_of(HI.of) == ("GPU-3",)
    assert loom.fabric.drmap.replicas_on("GPU-1") == ()
