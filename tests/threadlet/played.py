"""The weaver's side of a link, played by a test: it keeps the inbox, hears beats and gives commands."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

import nats.errors
from nats.aio.client import Client
from nats.aio.msg import Msg

from torchloom.protocol.codec import decode_beat, decode_report, encode
from torchloom.protocol.ids import RankId
from torchloom.protocol.rank import Beat, Command, Farewell, Goodbye, Hello, Report, Welcome
from torchloom.protocol.subjects import BEAT, COMMAND, INBOX_STREAM, REPORT

RANK = RankId("job", "hi", 0)
BEAT_SECONDS = 0.05
"""Often enough for a test."""
PATIENCE = 60.0
"""Seconds after which something that has not come is taken not to come. Machines may have much else to do."""
T = TypeVar("T")


async def until(look: Callable[[], Awaitable[T | None]], what: str, seconds: float = PATIENCE) -> T:
    """What `look` finds, as soon as it finds something."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        with contextlib.suppress(nats.errors.Error):  # the server is just being restarted, or busy
            found = await look()
            if found:
                return found
        await asyncio.sleep(0.01)
    raise AssertionError(f"{what} did not come within {seconds} s")


async def until_true(condition: Callable[[], object], what: str, seconds: float = PATIENCE) -> None:
    async def look() -> object:
        return condition()

    await until(look, what, seconds)


class PlayedWeaver:
    def __init__(self, client: Client) -> None:
        self.client = client
        self.beats: list[Beat] = []
        self.welcomes = False
        """Whether it answers a hello; a rank that is not welcomed says it again after about a second."""
        self.farewells = True
        """Whether it answers a goodbye; a rank that hears no farewell waits for it as long as it may."""

    async def begin(self) -> None:
        subjects = [subject.pattern() for subject in INBOX_STREAM.subjects]
        await self.client.jetstream().add_stream(name=INBOX_STREAM.name, subjects=subjects)

        async def hear(message: Msg) -> None:
            self.beats.append(decode_beat(message.data))

        async def greet(message: Msg) -> None:
            report = decode_report(message.data)
            if isinstance(report, Hello) and self.welcomes:
                _, _, job, replica, rank = message.subject.split(".")
                welcome = Welcome(term=0, incarnation=report.incarnation, beat_seconds=BEAT_SECONDS)
                await self.say(welcome, RankId(job, replica, int(rank)))
            if isinstance(report, Goodbye) and self.farewells:
                _, _, job, replica, rank = message.subject.split(".")
                await self.say(Farewell(term=0, incarnation=report.incarnation), RankId(job, replica, int(rank)))

        await self.client.subscribe(BEAT.pattern(), cb=hear)
        await self.client.subscribe(REPORT.pattern(), cb=greet)
        await self.client.flush()

    async def reports(self) -> list[Hello | Goodbye]:
        """Every hello and goodbye stored so far."""
        return [report for report in await self.letters() if isinstance(report, Hello | Goodbye)]

    async def letters(self) -> list[Report]:
        """Everything stored so far."""
        js = self.client.jetstream(timeout=5)
        count = (await js.stream_info(INBOX_STREAM.name)).state.last_seq
        stored = [await js.get_msg(INBOX_STREAM.name, seq) for seq in range(1, count + 1)]
        return [decode_report(message.data or b"") for message in stored]

    async def report(self, kind: type[T], which: int = 0) -> T:
        """The n-th report of a kind, waited for."""

        async def found() -> T | None:
            matching = [report for report in await self.letters() if isinstance(report, kind)]
            return matching[which] if len(matching) > which else None

        return await until(found, f"{kind.__name__} number {which}")

    async def beat(self, fits: Callable[[Beat], object] = lambda _: True) -> Beat:
        async def found() -> Beat | None:
            return next((beat for beat in self.beats if fits(beat)), None)

        return await until(found, "such a beat")

    async def say(self, command: Command | bytes, rank: RankId = RANK) -> None:
        data = command if isinstance(command, bytes) else encode(command)
        await self.client.publish(COMMAND.for_rank(rank), data)
        await self.client.flush()
