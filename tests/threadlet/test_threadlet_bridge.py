"""A threadlet and the checkpoints of its process: what it offers for them, and that a goodbye waits for them."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest

from tests.threadlet.connection.test_link import join, warnings
from tests.threadlet.played import PlayedWeaver
from torchloom import Threadlet
from torchloom.checkpoints import threadlet_bridge
from torchloom.protocol.rank import Goodbye, Hello, Knobs, Report, Saved
from torchloom.settings import Settings
from torchloom.threadlet.process.exit_reason import Ending

OFF = Settings(off=True)


class Keeper:
    """Checkpoints that write nothing."""

    def __init__(self, every: int | None = 100, trouble: BaseException | None = None) -> None:
        self.every = every
        self.steps: list[int] = []
        self.waited: list[float | None] = []
        self.trouble = trouble

    def wanted(self, step: int) -> str:
        self.steps.append(step)
        return f"/runs/a/step-{step}"

    def wait(self, seconds: float | None = None) -> bool:
        self.waited.append(seconds)
        side = threadlet_bridge.current_threadlet()
        if side is not None:
            side.tell(Saved(incarnation=side.incarnation, step=9, folder="/runs/a", size=1, seconds=1.0))
        if self.trouble is not None:
            raise self.trouble
        return True


@pytest.fixture
def loom() -> Threadlet:
    """One that is off: it has a boundary all the same."""
    return join(OFF)


@pytest.fixture(autouse=True)
def _nothing_is_kept() -> Iterator[None]:
    """Each test begins without checkpoints in this process."""
    threadlet_bridge._checkpoints.clear()
    yield
    threadlet_bridge._checkpoints.clear()


# ── what is offered ──


def test_the_interval_is_a_knob_that_reaches_the_checkpoints(loom: Threadlet) -> None:
    keeper = Keeper(every=100)
    loom.keep(keeper)
    knob = loom.knobs["checkpoint_interval"]
    assert (knob.spec.kind, knob.spec.value, knob.spec.low, knob.spec.unit) == ("int", 100, 1.0, "steps")
    knob.turn(30)
    assert keeper.every == 30
    keeper.every = 40  # the script may change it, too
    assert loom.values()["checkpoint_interval"] == 40


def test_checkpoints_that_the_script_times_itself_have_no_such_knob(
    loom: Threadlet, caplog: pytest.LogCaptureFixture
) -> None:
    keeper = Keeper(every=None)
    loom.keep(keeper)
    assert "checkpoint_interval" not in loom.knobs
    assert loom._boundary.save is not None
    assert loom._boundary.save(7) == "/runs/a/step-7"
    assert keeper.steps == [7]
    assert warnings(caplog) == []


def test_what_the_script_registered_before_goes_before(loom: Threadlet) -> None:
    mine = loom.checkpoint_interval(5)
    save = loom.on_checkpoint(lambda step: "mine")
    loom.keep(Keeper())
    assert loom.knobs["checkpoint_interval"] is mine
    assert loom._boundary.save is save


def test_what_the_script_registers_later_goes_before_as_well_and_silently(
    loom: Threadlet, caplog: pytest.LogCaptureFixture
) -> None:
    loom.keep(Keeper())
    mine = loom.checkpoint_interval(5)
    save = loom.on_checkpoint(lambda step: "mine")
    assert loom.knobs["checkpoint_interval"] is mine
    assert loom._boundary.save is save
    assert warnings(caplog) == []
    loom.keep(Keeper())  # and stays
    assert loom.knobs["checkpoint_interval"] is mine
    assert loom._boundary.save is save
    loom.checkpoint_interval(6)
    assert ["two knobs" in text for text in warnings(caplog)] == [True]


def test_of_several_the_newest_count(loom: Threadlet, caplog: pytest.LogCaptureFixture) -> None:
    old, new = Keeper(every=1), Keeper(every=2)
    loom.keep(old)
    loom.keep(new)
    loom.knobs["checkpoint_interval"].turn(3)
    assert loom._boundary.save is not None
    loom._boundary.save(7)
    assert (old.every, new.every, old.steps, new.steps) == (1, 3, [], [7])
    assert warnings(caplog) == []


def test_an_interval_that_makes_no_sense_is_told_and_training_goes_on(
    loom: Threadlet, caplog: pytest.LogCaptureFixture
) -> None:
    loom.keep(Keeper(every=0))
    assert "checkpoint_interval" not in loom.knobs
    assert loom._boundary.save is not None
    assert ["cannot be offered" in text for text in warnings(caplog)] == [True]


# ── registration ──


async def test_a_live_threadlet_is_found_and_offers_what_was_kept_before_it_came(
    weaver: PlayedWeaver, lively: Settings
) -> None:
    keeper = Keeper(every=100)
    threadlet_bridge.register_checkpoints(keeper)
    assert threadlet_bridge.current_threadlet() is None
    loom = join(lively)
    assert threadlet_bridge.current_threadlet() is loom
    offered = await weaver.report(Knobs)
    assert "checkpoint_interval" in {spec.name for spec in offered.knobs}
    assert offered.checkpoints
    loom.close()
    assert threadlet_bridge.current_threadlet() is None


async def test_checkpoints_made_later_are_offered_too(weaver: PlayedWeaver, lively: Settings) -> None:
    loom = join(lively)
    await weaver.report(Hello)
    keeper = Keeper()
    threadlet_bridge.register_checkpoints(keeper)
    assert "checkpoint_interval" in loom.knobs


def test_a_threadlet_that_is_off_is_nobodys_side(loom: Threadlet) -> None:
    assert threadlet_bridge.current_threadlet() is None
    loom.tell(Saved(incarnation="1" * 24, step=1, folder="/a", size=1, seconds=1.0))  # no one hears it
    keeper = Keeper()
    threadlet_bridge.register_checkpoints(keeper)
    loom.close()
    assert keeper.waited == []


async def test_in_a_forked_child_nobody_is_told_and_nothing_waited_for(weaver: PlayedWeaver, lively: Settings) -> None:
    keeper = Keeper()
    threadlet_bridge.register_checkpoints(keeper)
    loom = join(lively)
    await weaver.report(Hello)
    pid = os.fork()
    if pid == 0:  # pragma: no cover  another process
        os._exit(
            0 if threadlet_bridge.current_threadlet() is None and keeper.waited == [] and not loom.connected else 1
        )
    assert (await asyncio.to_thread(os.waitpid, pid, 0))[1] == 0
    assert threadlet_bridge.current_threadlet() is loom


# ── the goodbye ──


async def reports(weaver: PlayedWeaver) -> list[type[Report]]:
    await weaver.report(Goodbye)
    return [type(report) for report in await weaver.letters() if not isinstance(report, Knobs)]


async def test_a_goodbye_waits_for_what_is_being_written_and_tells_of_it(
    weaver: PlayedWeaver, lively: Settings
) -> None:
    keeper = Keeper()
    threadlet_bridge.register_checkpoints(keeper)
    loom = join(replace(lively, goodbye_seconds=60.0))
    await weaver.report(Hello)
    for _ in range(2):  # only the first counts
        await asyncio.to_thread(loom.end, Ending())
    assert keeper.waited == [30.0]
    assert await reports(weaver) == [Hello, Saved, Goodbye]


async def test_a_goodbye_is_said_whatever_becomes_of_the_checkpoints(weaver: PlayedWeaver, lively: Settings) -> None:
    keeper = Keeper(trouble=OSError("disk gone"))
    threadlet_bridge.register_checkpoints(keeper)
    await asyncio.to_thread(join(replace(lively, goodbye_seconds=60.0)).close)
    assert await reports(weaver) == [Hello, Saved, Goodbye]


async def test_who_is_tired_of_waiting_may_interrupt_and_the_goodbye_is_said(
    weaver: PlayedWeaver, lively: Settings
) -> None:
    keeper = Keeper(trouble=KeyboardInterrupt())
    threadlet_bridge.register_checkpoints(keeper)
    loom = join(replace(lively, goodbye_seconds=60.0))
    with pytest.raises(KeyboardInterrupt):
        await asyncio.to_thread(loom.close)
    assert threadlet_bridge.current_threadlet() is None
    assert await reports(weaver) == [Hello, Saved, Goodbye]


async def test_telling_takes_no_time_where_nobody_listens(settings: Settings, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)
    loom = join(Settings(addr="nats://127.0.0.1:9", welcome_seconds=0.0))
    began = time.process_time()
    for step in range(1000):
        loom.tell(Saved(incarnation=loom.incarnation, step=step, folder="/a", size=1, seconds=1.0))
    assert time.process_time() - began < 2.0  # and nothing to wait for: what others do on the machine does not count
