"""Devices that fail, and what stands on them."""

from __future__ import annotations

from tests.core.loom import HI, Loom
from torchloom.protocol.facts import ALL_OVER, DeviceFailed, DeviceWarned
from torchloom.protocol.ids import RankId
from torchloom.protocol.operator import Done, Fail, No, Recover, Register
from torchloom.protocol.phrase import Phrase, phrase
from torchloom.protocol.records import About


def test_a_device_shared_by_two_replicas_fails_them_both() -> None:
    loom = Loom()
    loom.join(RankId("j", "a", 0), devices=("GPU-1",))
    loom.join(RankId("j", "b", 0), devices=("GPU-1",))
    answer = loom.ask(Fail(device="GPU-1", cause="XID 79")).answer
    assert isinstance(answer, Done)
    assert answer.replicas == (("j", "a"), ("j", "b"))
    assert loom.open_incidents() == [phrase("device_failed", device="GPU-1", cause="XID 79")]


def test_an_unknown_device_is_said_to_be_unknown_and_changes_nothing() -> None:
    loom = Loom()
    loom.join(devices=("GPU-1234",))
    before = loom.cluster.state()
    decision = loom.ask(Fail(device="GPU-1243"))
    assert isinstance(decision.answer, No)
    assert decision.answer.why == phrase("device_unknown", device="GPU-1243")
    assert decision.answer.hint == phrase("did_you_mean", name="GPU-1234")
    assert decision.records == ()
    assert loom.cluster.state() == before


def test_a_device_that_failed_already_is_one_incident() -> None:
    loom = Loom()
    loom.join()
    loom.ask(Fail(device="GPU-1"))
    loom.tell(DeviceFailed(device="GPU-1"))
    assert loom.tell(DeviceFailed(device="GPU-1")).records == ()
    assert len(loom.cluster.incidents) == 1


def test_a_recovered_device_closes_its_incident() -> None:
    loom = Loom()
    loom.join()
    loom.ask(Fail(device="GPU-1"))
    loom.ask(Recover(device="GPU-1", operator="ada"))
    assert loom.open_incidents() == []
    assert not loom.cluster.devices["GPU-1"].failed
    assert loom.cluster.devices["GPU-1"].incident == ""


def test_a_device_registered_by_hand_is_on_the_map_and_survives() -> None:
    loom = Loom()
    loom.ask(Register(device="GPU-9", job="manual", replica="hi"))
    assert loom.cluster.drmap.replicas_on("GPU-9") == (("manual", "hi"),)
    assert loom.ask(Register(device="GPU-9", job="manual", replica="hi")).records == ()
    assert loom.restarted().cluster.drmap.replicas_on("GPU-9") == (("manual", "hi"),)


def test_a_new_life_on_another_device_leaves_the_old_one() -> None:
    loom = Loom()
    loom.join(number=1, devices=("GPU-1", "GPU-2"))
    loom.join(number=2, devices=("GPU-3",))
    assert [assignment.device for assignment in loom.cluster.drmap.assignments_of(HI)] == ["GPU-3"]
    assert loom.cluster.drmap.replicas_on("GPU-1") == ()


# ── devices that are not well ──


def hot(detail: str = "95 °C", over: bool = False, device: str = "GPU-1", what: str = "hot") -> DeviceWarned:
    return DeviceWarned(device=device, what=what, detail=detail, source="agent n1", over=over)


def test_a_failed_device_is_an_incident_that_a_policy_may_act_on() -> None:
    loom = Loom()
    loom.join()
    loom.tell(DeviceFailed(device="GPU-1"))
    assert [incident.kind for incident in loom.cluster.incidents.values()] == ["device"]


def test_a_condition_of_a_device_is_one_incident_from_its_beginning_to_its_end() -> None:
    loom = Loom()
    loom.join()
    loom.tell(hot())
    (incident,) = loom.cluster.incidents.values()
    assert (incident.kind, incident.about) == ("device_warning", About(device="GPU-1", part="hot"))
    assert incident.what == phrase("device_not_well", device="GPU-1", condition="hot", detail="95 °C")
    assert phrase("replicas_on_it", replicas=[HI.replica_id]) in incident.evidence
    assert loom.tell(hot()).records == ()
    assert not loom.cluster.devices["GPU-1"].failed
    loom.tell(hot("", over=True))
    assert loom.open_incidents() == []
    assert loom.cluster.incidents[incident.id].outcome == phrase("device_well_again")
    assert loom.tell(hot("", over=True)).records == ()
    loom.tell(hot())
    assert len(loom.open_incidents()) == 1


def test_what_is_new_about_a_condition_is_added_to_its_incident() -> None:
    loom = Loom()
    loom.join()
    loom.tell(hot("XID 13", what="xid"))
    loom.tell(hot("XID 31", what="xid"))
    (incident,) = loom.cluster.incidents.values()
    sayings = [phrase("source_says", source="agent n1", what=what) for what in ("XID 13", "XID 31")]
    assert [line for line in incident.evidence if isinstance(line, Phrase) and line.code == "source_says"] == sayings


def test_conditions_and_devices_are_told_apart() -> None:
    loom = Loom()
    loom.join(devices=("GPU-1", "GPU-11"))
    for fact in (hot(), hot(what="throttled"), hot(device="GPU-11")):
        loom.tell(fact)
    assert len(loom.open_incidents()) == 3
    loom.tell(hot("", over=True))
    left = {i.about for i in loom.cluster.incidents.open_of("")}
    assert left == {About(device="GPU-1", part="throttled"), About(device="GPU-11", part="hot")}


def test_an_agent_that_begins_anew_ends_what_the_one_before_said_and_no_failure() -> None:
    loom = Loom()
    loom.join(devices=("GPU-1", "GPU-11"))
    for fact in (hot(), hot(what="xid"), hot(device="GPU-11"), DeviceFailed(device="GPU-1", cause="XID 79")):
        loom.tell(fact)
    loom.tell(hot("", over=True, what=ALL_OVER))
    assert loom.open_incidents() == [
        phrase("device_not_well", device="GPU-11", condition="hot", detail="95 °C"),
        phrase("device_failed", device="GPU-1", cause="XID 79"),
    ]


def test_a_condition_of_a_device_that_nobody_knows_changes_nothing() -> None:
    loom = Loom()
    loom.join()
    before = loom.cluster.state()
    decision = loom.tell(hot(device="GPU-9"))
    assert isinstance(decision.answer, No)  # nobody waits for it: the weaver counts it
    assert (decision.records, loom.cluster.state()) == ((), before)


def test_warnings_are_the_same_after_a_restart() -> None:
    loom = Loom()
    loom.join()
    loom.tell(hot())
    again = loom.restarted()
    assert again.cluster.state() == loom.cluster.state()
    assert again.tell(hot()).records == ()
    again.tell(hot("", over=True))
    assert again.open_incidents() == []
