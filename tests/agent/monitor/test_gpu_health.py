"""What follows from what GPUs say: judged without a GPU or a clock; then told by the loop, to a real server."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tests.agent.harness import until
from tests.agent.nvml.fake import A, B, FakeDriver
from tests.flow.plane import Plane, plane
from torchloom.agent.monitor.gpu_health import (
    UNTHROTTLED_SECONDS,
    XID_SECONDS,
    XIDS,
    DeviceHistory,
    GpuHealth,
    HealthFact,
    describe,
    explain,
    judge,
)
from torchloom.agent.monitor.gpu_readings import GpuEvent, GpuState
from torchloom.agent.node import Node
from torchloom.bus.connection import connect, find
from torchloom.bus.streams import read_log
from torchloom.protocol.codec import decode_fact
from torchloom.protocol.facts import ALL_OVER, DeviceFailed, DeviceWarned, Fact
from torchloom.protocol.node import Reading
from torchloom.protocol.phrase import Prose, phrase
from torchloom.protocol.subjects import INBOX_STREAM, Role
from torchloom.settings import Settings

Report = tuple[str, Prose]
GPU = "GPU-1"
FATAL = [number for number, xid in XIDS.items() if xid.fatal]
MILD = [number for number, xid in XIDS.items() if not xid.fatal]


class Judge:
    """Looks again and again, and remembers."""

    def __init__(self) -> None:
        self.known: dict[str, DeviceHistory] = {}
        self.now = 1000.0
        self.look()  # the first one says that what was said before does not hold

    def look(self, *events: int | None, lost: Prose = "", silent: float = 0.0, **reading: Any) -> list[Report]:
        """What is reported after one more look at the GPU."""
        read = None if lost or silent else Reading(device=GPU, **reading)
        seen = (GpuState(GPU, read, lost=lost, silent=silent),)
        happened = [GpuEvent(GPU, number) for number in events]
        self.known, facts = judge(self.known, seen, happened, 90.0, self.now)
        return [report(fact) for fact in facts]


def report(fact: HealthFact) -> Report:
    """What a fact says: that the device failed, or which condition began, each with its cause, or what is over."""
    if isinstance(fact, DeviceFailed):
        return "failed", fact.cause
    return fact.what, "over" if fact.over else fact.detail


# ── judging ──


@pytest.mark.parametrize("number", FATAL)
def test_a_fatal_xid_fails_the_device(number: int) -> None:
    assert Judge().look(number) == [("failed", describe(number))]


@pytest.mark.parametrize("number", [*MILD, 9999])
def test_any_other_xid_is_a_warning_that_ends_when_it_does_not_come_again(number: int) -> None:
    one = Judge()
    assert one.look(number) == [("xid", describe(number))]
    assert one.look(number) == []
    one.now += XID_SECONDS
    assert one.look() == []
    one.now += 1
    assert one.look() == [("xid", "over")]
    assert one.look() == []


def test_the_table_says_what_nvidia_says() -> None:
    assert describe(79) == phrase("xid", number=79, meaning="GPU has fallen off the bus")
    assert {48, 64, 74, 79, 95, 119, 120} <= set(FATAL)
    assert {13, 31, 43, 45, 63, 94} <= set(MILD)
    assert not explain(9999).fatal


def test_another_xid_is_news_while_the_warning_stands() -> None:
    one = Judge()
    one.look(31)
    assert one.look(13, 45) == [("xid", describe(45))]


def test_a_fatal_xid_that_comes_again_is_told_again() -> None:
    """A person may have said in between that the device works; the weaver ignores what it knows."""
    one = Judge()
    assert one.look(79) == one.look(79) == [("failed", describe(79))]


def test_uncorrected_errors_that_were_there_before_are_no_news_but_more_are() -> None:
    one = Judge()
    assert one.look(ecc_errors=3) == []
    assert one.look(ecc_errors=3) == []
    assert one.look(ecc_errors=None) == []
    assert one.look(ecc_errors=5) == [("failed", phrase("ecc_errors", count=5, more=2))]
    assert one.look(ecc_errors=5) == []
    assert one.look(ecc_errors=0) == []  # the driver was loaded anew
    assert one.look(ecc_errors=1) == [("failed", phrase("ecc_errors", count=1, more=1))]


def test_an_ecc_event_fails_the_device_with_all_that_is_known() -> None:
    one = Judge()
    one.look(ecc_errors=0)
    causes = [describe(48), phrase("ecc_error"), phrase("ecc_errors", count=1, more=1)]
    assert one.look(48, None, None, ecc_errors=1) == [("failed", phrase("device_causes", causes=causes))]


def test_a_lost_device_fails_once_until_it_can_be_read_again() -> None:
    one, lost = Judge(), phrase("device_off_bus")
    assert one.look(lost=lost) == [("failed", lost)]
    assert one.look(lost=lost) == []
    assert one.look() == []
    assert one.look(lost=lost) == [("failed", lost)]


def test_a_hot_device_is_hot_until_it_is_five_degrees_cooler() -> None:
    one = Judge()
    assert one.look(temperature=89.0) == []
    assert one.look(temperature=90.0) == [("hot", phrase("device_hot", celsius=90.0, limit=90.0))]
    assert one.look(temperature=95.0) == []
    assert one.look(temperature=85.5) == []
    assert one.look(temperature=None) == []
    assert one.look(temperature=85.0) == [("hot", "over")]
    assert one.look(temperature=88.0) == []
    assert one.look(temperature=91.0) == [("hot", phrase("device_hot", celsius=91.0, limit=90.0))]


def test_throttling_by_the_hardware_is_told_once_however_often_it_comes_and_goes() -> None:
    one = Judge()
    assert one.look(throttled=("power cap", "thermal slowdown")) == []
    slow = phrase("device_throttled", reasons=("hardware slowdown",))
    assert one.look(throttled=("hardware slowdown", "power cap")) == [("throttled", slow)]
    for _ in range(3):
        one.now += UNTHROTTLED_SECONDS - 1
        assert one.look() == []
        assert one.look(throttled=("power brake",)) == []
    one.now += UNTHROTTLED_SECONDS + 1
    assert one.look(silent=1.0) == [("silent", phrase("driver_silent", seconds=1.0))]
    assert one.look() == [("throttled", "over"), ("silent", "over")]


def test_a_driver_that_does_not_answer_is_told_of_until_it_does() -> None:
    one = Judge()
    assert one.look(silent=12.0) == [("silent", phrase("driver_silent", seconds=12.0))]
    assert one.look(silent=13.0) == []
    assert one.look() == [("silent", "over")]


def test_nothing_new_is_told_of_a_device_that_cannot_be_read() -> None:
    one = Judge()
    one.look(temperature=95.0, throttled=("power brake",))
    one.now += 10 * UNTHROTTLED_SECONDS
    known, facts = judge(one.known, (GpuState(GPU),), (), 90.0, one.now)
    assert (facts, set(known[GPU].conditions)) == ((), {"hot", "throttled"})


def test_the_first_look_at_a_device_ends_what_an_agent_before_said_of_it() -> None:
    reading = Reading(device=GPU, temperature=99.0)
    _, facts = judge({}, (GpuState(GPU, reading),), (), 90.0, 1.0, "agent n1")
    assert facts == (
        DeviceWarned(device=GPU, what=ALL_OVER, source="agent n1", over=True),
        DeviceWarned(device=GPU, what="hot", detail=phrase("device_hot", celsius=99.0, limit=90.0), source="agent n1"),
    )


def test_an_event_counts_also_before_the_device_was_ever_read() -> None:
    _, facts = judge({}, (), (GpuEvent(GPU, 79),), Settings.device_temperature_celsius, 1.0)
    assert [report(fact) for fact in facts] == [("all", "over"), ("failed", describe(79))]


def test_each_device_is_judged_by_what_happened_to_it() -> None:
    _, facts = judge(
        {}, (GpuState("GPU-1"), GpuState("GPU-2")), (GpuEvent("GPU-2", 79),), Settings.device_temperature_celsius, 1.0
    )
    assert [fact.device for fact in facts if isinstance(fact, DeviceFailed)] == ["GPU-2"]


# ── telling ──


async def test_facts_wait_until_the_server_can_keep_them_and_are_told_in_order_once(
    driver: FakeDriver, tmp_path: Path
) -> None:
    async with plane(tmp_path / "state", weaver=False) as up:
        client = await connect(find(up.settings, Role.AGENT), name="agent")
        node = Node("n1", "127.0.0.1", 1, 1, (A, B))
        health = GpuHealth(client, node, "0" * 24)
        watching = asyncio.create_task(health.watch())
        try:
            await until(lambda: len(health.readings()) == 2)
            driver.xid(B, 31)
            driver.xid(A, 79)
            await until(lambda: len(health._unsent) == 4)  # there is no stream yet
            up.start_weaver()
            await until(lambda: not health._unsent)
            found = await told_to_the_weaver(up)
            about = [fact for fact in found if isinstance(fact, (DeviceFailed, DeviceWarned))]
            assert sorted(((fact.device, report(fact)) for fact in about), key=str) == [
                (A, ("all", "over")),
                (A, ("failed", describe(79))),
                (B, ("all", "over")),
                (B, ("xid", describe(31))),
            ]
            assert {fact.source for fact in about} == {"agent n1"}
            assert report(about[0]) == ("all", "over")
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
            await client.close()


async def test_where_there_are_no_gpus_nobody_watches(tmp_path: Path) -> None:
    async with plane(tmp_path / "state", weaver=False) as up:
        client = await connect(find(up.settings, Role.AGENT), name="agent")
        health = GpuHealth(client, Node("n1", "127.0.0.1", 1, 1, ()), "0" * 24)
        await health.watch()
        assert health.readings() == ()
        await client.close()


async def told_to_the_weaver(up: Plane) -> list[Fact]:
    client = await connect(find(up.settings, Role.WEAVER), name="test")
    try:
        return [decode_fact(stored.data) async for stored in read_log(client, INBOX_STREAM.name, 1)]
    finally:
        await client.close()
