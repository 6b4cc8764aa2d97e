"""From readings of GPUs to facts for the weaver: a device failed, is not well, or is well again.

`judge` compares what is seen now with what was known before, and reports what is new: a failure when it happens, a
condition when it begins and when it ends. It is pure. The loop around it looks twice a second, and at once when the
driver reports an event. Facts are kept until the server has them on disk, each under its own id, so that none is lost
or counted twice.

An agent starts without memory, and what an earlier agent reported about a device may be over. So the first fact about
each device is that all conditions are over; those that still hold are reported again.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import nats.errors
from nats.aio.client import Client

from torchloom.agent.monitor.gpus import HARDWARE, Gpus, Happened, Seen
from torchloom.agent.monitor.xids import describe, explain
from torchloom.agent.node import Node
from torchloom.protocol.codec import encode
from torchloom.protocol.facts import ALL_OVER, DeviceFailed, DeviceWarned
from torchloom.protocol.node import Reading
from torchloom.protocol.phrase import Phrase, Prose, phrase
from torchloom.protocol.subjects import FACT
from torchloom.settings import Settings

LOOK_SECONDS = 0.5
ACK_SECONDS = 2.0
MOST_UNTOLD = 1000
"""Facts that are kept while the server is away; past it the oldest is dropped."""
COOLER = 5.0
"""Degrees below the limit at which a hot device is no longer hot."""
UNTHROTTLED_SECONDS = 30.0
"""Seconds after which a device is no longer throttled. Throttling that comes and goes is one condition."""
XID_SECONDS = 600.0
"""Seconds after which an error that has not come again is over."""

HealthFact = DeviceFailed | DeviceWarned


@dataclass(frozen=True)
class Warned:
    """A condition that was reported and has not ended."""

    at: float
    """When it last held."""
    xid: int | None = None
    """The driver's error, where it is one."""


@dataclass(frozen=True)
class Known:
    """What is known about a device."""

    ecc_errors: int | None = None
    lost: Prose = ""
    warned: Mapping[str, Warned] = field(default_factory=dict)


def judge(
    before: Mapping[str, Known],
    seen: Sequence[Seen],
    events: Sequence[Happened],
    hot: float,
    now: float,
    source: str = "agent",
) -> tuple[dict[str, Known], tuple[HealthFact, ...]]:
    """What is known of each device now, and what is new. `hot` is a temperature in degrees Celsius."""
    after, facts = dict(before), list[HealthFact]()
    looks = {look.device: look for look in seen}
    for device in dict.fromkeys([*looks, *(event.device for event in events)]):
        look = looks.get(device) or Seen(device)
        known = before.get(device)
        if known is None:
            known = Known()
            facts.append(DeviceWarned(device=device, what=ALL_OVER, source=source, over=True))
        happened = [event for event in events if event.device == device]
        if causes := _causes(known, look, happened):
            cause = causes[0] if len(causes) == 1 else phrase("device_causes", causes=causes)
            facts.append(DeviceFailed(device=device, cause=cause, source=source))
        warned = dict(known.warned)
        for what, detail in _holding(known, look, happened, hot).items():
            xid = _mild(happened) if what == "xid" else None
            if what not in warned or xid != warned[what].xid:
                facts.append(DeviceWarned(device=device, what=what, detail=detail, source=source))
            warned[what] = Warned(now, xid)
        for what in [what for what, warning in warned.items() if _ended(what, warning, look, hot, now)]:
            facts.append(DeviceWarned(device=device, what=what, source=source, over=True))
            del warned[what]
        errors = look.reading.ecc_errors if look.reading is not None else None
        after[device] = Known(
            ecc_errors=known.ecc_errors if errors is None else errors,
            lost="" if look.reading is not None else look.lost or known.lost,
            warned=warned,
        )
    return after, tuple(facts)


def _causes(known: Known, look: Seen, events: Sequence[Happened]) -> list[Prose]:
    """New reasons why the device has failed."""
    xids = dict.fromkeys(event.xid for event in events)
    causes: list[Prose] = [describe(xid) for xid in xids if xid is not None and explain(xid).fatal]
    if None in xids:
        causes.append(phrase("ecc_error"))
    if look.lost and not known.lost:
        causes.append(look.lost)
    errors = look.reading.ecc_errors if look.reading is not None else None
    if errors is not None and known.ecc_errors is not None and errors > known.ecc_errors:
        causes.append(phrase("ecc_errors", count=errors, more=errors - known.ecc_errors))
    return causes


def _holding(known: Known, look: Seen, events: Sequence[Happened], hot: float) -> dict[str, Phrase]:
    """The conditions in which the device is not well, each with its detail."""
    found = {}
    reading = look.reading or Reading(device=look.device)
    if reading.temperature is not None:
        edge = hot - (COOLER if "hot" in known.warned else 0.0)
        if reading.temperature > edge or reading.temperature == hot:
            found["hot"] = phrase("device_hot", celsius=reading.temperature, limit=hot)
    if slow := [reason for reason in reading.throttled if reason in HARDWARE.values()]:
        found["throttled"] = phrase("device_throttled", reasons=slow)
    if look.silent:
        found["silent"] = phrase("driver_silent", seconds=look.silent)
    if (xid := _mild(events)) is not None:
        found["xid"] = describe(xid)
    return found


def _mild(events: Sequence[Happened]) -> int | None:
    """The last error of the driver that is not fatal."""
    return next((e.xid for e in reversed(events) if e.xid is not None and not explain(e.xid).fatal), None)


def _ended(what: str, warning: Warned, look: Seen, hot: float, now: float) -> bool:
    reading = look.reading
    match what:
        case "hot":
            cool = hot - COOLER
            return reading is not None and reading.temperature is not None and reading.temperature <= cool
        case "throttled":
            return reading is not None and now - warning.at > UNTHROTTLED_SECONDS
        case "silent":
            return reading is not None
    return now - warning.at > XID_SECONDS


class GpuHealth:
    """Watches the GPUs of a node. Without GPUs it does nothing."""

    def __init__(
        self, client: Client, node: Node, incarnation: str, hot: float = Settings.device_temperature_celsius
    ) -> None:
        self._client = client
        self._node = node
        self._incarnation = incarnation
        self._hot = hot
        self._gpus = Gpus(node.devices, self._ring)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._bell = asyncio.Event()
        self._known: dict[str, Known] = {}
        self._untold: deque[tuple[int, HealthFact]] = deque(maxlen=MOST_UNTOLD)
        self._count = itertools.count(1)

    def look(self) -> tuple[Seen, ...]:
        """What is known of the GPUs now."""
        return self._gpus.look()

    def readings(self) -> tuple[Reading, ...]:
        """The fresh ones, for a beat."""
        return tuple(seen.reading for seen in self._gpus.look() if seen.reading is not None)

    async def watch(self) -> None:
        """Until cancelled."""
        if not self._node.devices:
            return
        self._loop = asyncio.get_running_loop()
        self._gpus.start()
        try:
            while True:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(LOOK_SECONDS):
                        await self._bell.wait()
                self._bell.clear()
                seen, events = self._gpus.look(), self._gpus.events()
                source = f"agent {self._node.name}"
                self._known, facts = judge(self._known, seen, events, self._hot, time.monotonic(), source)
                self._untold.extend((next(self._count), fact) for fact in facts)
                await self._tell()
        finally:
            self._gpus.close()

    def _ring(self) -> None:
        """There is an event. Called in a thread of `Gpus`."""
        loop = self._loop
        if loop is not None:
            with contextlib.suppress(RuntimeError):  # it is closed: the agent has left
                loop.call_soon_threadsafe(self._bell.set)

    async def _tell(self) -> None:
        """Publish waiting facts in order. What the server does not store now is published again later."""
        subject = FACT.to(source=self._node.name)
        while self._untold:
            number, fact = self._untold[0]
            headers = {"Nats-Msg-Id": f"{self._incarnation}-health-{number}"}
            try:
                await self._client.jetstream().publish(subject, encode(fact), timeout=ACK_SECONDS, headers=headers)
            except (nats.errors.Error, OSError):
                return
            self._untold.popleft()
