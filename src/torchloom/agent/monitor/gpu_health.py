"""From readings of GPUs to facts for the weaver: a device failed, is not well, or is well again.

`judge` compares what is seen now with what was known before, and reports what is new: a failure when it happens, a
condition when it begins and when it ends. It is pure. The loop around it looks twice a second, and at once when the
driver reports an event. Facts are kept until the server has them on disk, each under its own id, so that none is lost
or counted twice.

An agent starts without memory, and what an earlier agent reported about a device may be over. So the first fact about
each device is that all conditions are over; those that still hold are reported again.

The meaning of each error number of the driver (XID) is NVIDIA's, from its catalogue of XIDs. Fatal are those after
which it asks for a reset, a reboot or a repair: until then nothing computed there is to be trusted. Where it asks only
to start the application again, or to reset when convenient, the device is warned about and stays in use. So is one
whose number is not in the table: what nobody has weighed must not take a device away.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import nats.errors
from nats.aio.client import Client

from torchloom.agent.monitor.gpu_readings import HARDWARE, GpuEvent, Gpus, GpuState
from torchloom.agent.node import Node
from torchloom.bus.streams import store_once
from torchloom.bus.tasks import set_within
from torchloom.protocol.codec import encode
from torchloom.protocol.facts import ALL_OVER, DeviceFailed, DeviceWarned
from torchloom.protocol.node import Reading
from torchloom.protocol.phrase import Phrase, Prose, phrase
from torchloom.protocol.subjects import FACT
from torchloom.settings import Settings

LOOK_SECONDS = 0.5
MOST_UNSENT = 1000
"""Facts that are kept while the server is away; past it the oldest is dropped."""
COOLER = 5.0
"""Degrees below the limit at which a hot device is no longer hot."""
UNTHROTTLED_SECONDS = 30.0
"""Seconds after which a device is no longer throttled. Throttling that comes and goes is one condition."""
XID_SECONDS = 600.0
"""Seconds after which an error that has not come again is over."""

HealthFact = DeviceFailed | DeviceWarned


class Xid(NamedTuple):
    meaning: str
    fatal: bool = False


FATAL: Final = True

XIDS: Final[dict[int, Xid]] = {
    8: Xid("a channel got no further"),
    11: Xid("invalid commands from the application"),
    13: Xid("graphics engine exception, mostly by the application"),
    31: Xid("memory page fault, mostly by the application"),
    32: Xid("corrupted push buffer"),
    43: Xid("the application was stopped after its own error"),
    45: Xid("the application was cleaned up after its end or an earlier error"),
    46: Xid("GPU stopped processing", FATAL),
    48: Xid("uncorrected double-bit ECC error", FATAL),
    61: Xid("internal micro-controller breakpoint"),
    62: Xid("internal micro-controller halted", FATAL),
    63: Xid("memory is to be remapped at the next reset"),
    64: Xid("memory could not be remapped", FATAL),
    68: Xid("video decoder exception, mostly by the application"),
    69: Xid("graphics engine class error, mostly by the application"),
    74: Xid("NVLink error", FATAL),
    79: Xid("GPU has fallen off the bus", FATAL),
    92: Xid("many corrected ECC errors"),
    94: Xid("contained memory error: only the application it hit is affected"),
    95: Xid("uncontained memory error", FATAL),
    109: Xid("context switch timed out, mostly by the application"),
    119: Xid("GPU system processor does not answer", FATAL),
    120: Xid("GPU system processor error", FATAL),
    121: Xid("corrected error on the link to the processor"),
    140: Xid("ECC error that was not recovered from", FATAL),
    143: Xid("GPU could not be initialised", FATAL),
    154: Xid("the driver asks for another way to recover"),
}


def explain(number: int) -> Xid:
    return XIDS.get(number, Xid("not in the table"))


def describe(number: int) -> Phrase:
    return phrase("xid", number=number, meaning=explain(number).meaning)


@dataclass(frozen=True)
class Condition:
    """A condition that was reported and has not ended."""

    at: float
    """When it last held."""
    xid: int | None = None
    """The driver's error, where it is one."""


@dataclass(frozen=True)
class DeviceHistory:
    """What is known about a device."""

    ecc_errors: int | None = None
    lost: Prose = ""
    conditions: Mapping[str, Condition] = field(default_factory=dict)


def judge(
    before: Mapping[str, DeviceHistory],
    states: Sequence[GpuState],
    events: Sequence[GpuEvent],
    hot: float,
    now: float,
    source: str = "agent",
) -> tuple[dict[str, DeviceHistory], tuple[HealthFact, ...]]:
    """What is known of each device now, and what is new. `hot` is a temperature in degrees Celsius."""
    after, facts = dict(before), list[HealthFact]()
    by_device = {state.device: state for state in states}
    for device in dict.fromkeys([*by_device, *(event.device for event in events)]):
        state = by_device.get(device) or GpuState(device)
        history = before.get(device)
        if history is None:
            history = DeviceHistory()
            facts.append(DeviceWarned(device=device, what=ALL_OVER, source=source, over=True))
        own_events = [event for event in events if event.device == device]
        if causes := _causes(history, state, own_events):
            cause = causes[0] if len(causes) == 1 else phrase("device_causes", causes=causes)
            facts.append(DeviceFailed(device=device, cause=cause, source=source))
        conditions = dict(history.conditions)
        for what, detail in _holding(history, state, own_events, hot).items():
            xid = _mild(own_events) if what == "xid" else None
            if what not in conditions or xid != conditions[what].xid:
                facts.append(DeviceWarned(device=device, what=what, detail=detail, source=source))
            conditions[what] = Condition(now, xid)
        for what, condition in list(conditions.items()):
            if _ended(what, condition, state.reading, hot, now):
                facts.append(DeviceWarned(device=device, what=what, source=source, over=True))
                del conditions[what]
        if state.reading is None:
            after[device] = DeviceHistory(history.ecc_errors, state.lost or history.lost, conditions)
        else:
            errors = state.reading.ecc_errors
            after[device] = DeviceHistory(history.ecc_errors if errors is None else errors, "", conditions)
    return after, tuple(facts)


def _causes(history: DeviceHistory, state: GpuState, events: Sequence[GpuEvent]) -> list[Prose]:
    """New reasons why the device has failed."""
    xids = dict.fromkeys(event.xid for event in events)
    causes: list[Prose] = [describe(xid) for xid in xids if xid is not None and explain(xid).fatal]
    if None in xids:
        causes.append(phrase("ecc_error"))
    if state.lost and not history.lost:
        causes.append(state.lost)
    errors = state.reading.ecc_errors if state.reading is not None else None
    if errors is not None and history.ecc_errors is not None and errors > history.ecc_errors:
        causes.append(phrase("ecc_errors", count=errors, more=errors - history.ecc_errors))
    return causes


def _holding(history: DeviceHistory, state: GpuState, events: Sequence[GpuEvent], hot: float) -> dict[str, Phrase]:
    """The conditions in which the device is not well, each with its detail."""
    holding = {}
    reading = state.reading or Reading(device=state.device)
    if reading.temperature is not None:
        edge = hot - (COOLER if "hot" in history.conditions else 0.0)
        if reading.temperature > edge or reading.temperature == hot:
            holding["hot"] = phrase("device_hot", celsius=reading.temperature, limit=hot)
    if slow := [reason for reason in reading.throttled if reason in HARDWARE.values()]:
        holding["throttled"] = phrase("device_throttled", reasons=slow)
    if state.silent:
        holding["silent"] = phrase("driver_silent", seconds=state.silent)
    if (xid := _mild(events)) is not None:
        holding["xid"] = describe(xid)
    return holding


def _mild(events: Sequence[GpuEvent]) -> int | None:
    """The last error of the driver that is not fatal."""
    return next((e.xid for e in reversed(events) if e.xid is not None and not explain(e.xid).fatal), None)


def _ended(what: str, condition: Condition, reading: Reading | None, hot: float, now: float) -> bool:
    if what == "xid":
        return now - condition.at > XID_SECONDS
    if reading is None:
        return False
    if what == "throttled":
        return now - condition.at > UNTHROTTLED_SECONDS
    if what == "silent":
        return True
    return reading.temperature is not None and reading.temperature <= hot - COOLER


@dataclass(eq=False)
class GpuHealth:
    """Watches the GPUs of a node. Without GPUs it does nothing."""

    client: Client
    node: Node
    incarnation: str
    hot: float = Settings.device_temperature_celsius
    _bell: asyncio.Event = field(default_factory=asyncio.Event)
    _histories: dict[str, DeviceHistory] = field(default_factory=dict)
    _unsent: deque[tuple[int, HealthFact]] = field(default_factory=lambda: deque(maxlen=MOST_UNSENT))
    _count: itertools.count[int] = field(default_factory=lambda: itertools.count(1))

    def __post_init__(self) -> None:
        self.gpus = Gpus(self.node.devices, self._ring)
        self._loop = asyncio.get_running_loop()

    def readings(self) -> tuple[Reading, ...]:
        """The fresh ones, for a beat."""
        return tuple(state.reading for state in self.gpus.look() if state.reading is not None)

    async def watch(self) -> None:
        """Until cancelled."""
        if not self.node.devices:
            return
        with contextlib.closing(self.gpus):
            self.gpus.start()
            while True:
                await set_within(self._bell, LOOK_SECONDS)
                self._bell.clear()
                states, events = self.gpus.look(), self.gpus.events()
                source = f"agent {self.node.name}"
                self._histories, facts = judge(self._histories, states, events, self.hot, time.monotonic(), source)
                self._unsent.extend((next(self._count), fact) for fact in facts)
                await self._publish()

    def _ring(self) -> None:
        """There is an event. Called in a thread of `Gpus`."""
        with contextlib.suppress(RuntimeError):  # the loop is closed: the agent has left
            self._loop.call_soon_threadsafe(self._bell.set)

    async def _publish(self) -> None:
        """Publish waiting facts in order. What the server does not store now is published again later."""
        subject = FACT.to(source=self.node.name)
        while self._unsent:
            number, fact = self._unsent[0]
            try:
                await store_once(self.client, subject, encode(fact), id=f"{self.incarnation}-health-{number}")
            except (nats.errors.Error, OSError):
                return
            self._unsent.popleft()
