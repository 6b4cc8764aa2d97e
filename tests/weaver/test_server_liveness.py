"""A server that hangs is distinguished from a busy one, and the connection survives both."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

import psutil
import pytest
from nats.aio.client import Client
from nats.aio.msg import Msg

from torchloom.bus.connection import connect, find
from torchloom.bus.nats_server import EmbeddedServer
from torchloom.protocol.subjects import BEAT, Role
from torchloom.settings import Settings
from torchloom.weaver.server_liveness import QUIET, ServerLiveness

LOOK_SECONDS = 0.05
FLOOD = 40_000
SUBJECT = BEAT.to(job="j", replica="r", rank=0)


class Listener:
    """A weaver's link, and what came over it."""

    def __init__(self) -> None:
        self.client: Client
        self.heard = 0
        self.broke = 0

    async def hear(self, _: Msg) -> None:
        self.heard += 1

    async def note_break(self) -> None:
        self.broke += 1


@pytest.fixture
async def listener(settings: Settings) -> AsyncIterator[Listener]:
    made = Listener()
    made.client = await connect(find(settings, Role.WEAVER), name="test", keep_trying=True, on_lost=made.note_break)
    await made.client.subscribe(BEAT.pattern(), cb=made.hear)
    await made.client.flush()
    yield made
    await made.client.close()


async def until(what: Callable[[], bool], seconds: float = 60.0) -> None:
    async with asyncio.timeout(seconds):
        while not what():
            await asyncio.sleep(LOOK_SECONDS)


async def test_a_server_that_hangs_is_not_heard_and_the_same_link_goes_on_afterwards(
    server: EmbeddedServer, listener: Listener, settings: Settings
) -> None:
    liveness = ServerLiveness(listener.client)
    assert liveness.answers()
    await until(liveness.answers)
    assert server.process is not None
    process = psutil.Process(server.process.pid)
    process.suspend()
    try:
        await until(lambda: not liveness.answers())
    finally:
        process.resume()
    await until(liveness.answers)
    rank = await connect(find(settings, Role.THREADLET), name="rank")
    await rank.publish(SUBJECT, b"a beat")
    await until(lambda: listener.heard == 1)
    assert listener.broke == 0
    assert all(liveness.answers() for _ in range(QUIET))
    await rank.close()


async def test_a_pong_that_waits_behind_a_flood_of_beats_is_no_sign_of_deafness(
    listener: Listener, settings: Settings
) -> None:
    rank = await connect(find(settings, Role.THREADLET), name="rank")
    liveness = ServerLiveness(listener.client)
    flood = asyncio.create_task(_flood(rank))
    waited = longest = came = 0
    while listener.heard < FLOOD:
        await asyncio.sleep(0)
        if listener.client.stats["in_msgs"] == came:
            continue
        came, before = listener.client.stats["in_msgs"], liveness._ping
        assert liveness.answers()
        waited = waited + 1 if before is not None and before is liveness._ping else 0
        longest = max(longest, waited)
    await flood
    assert longest > QUIET  # else this showed nothing
    await rank.close()


async def _flood(rank: Client) -> None:
    for _ in range(FLOOD):
        await rank.publish(SUBJECT, b"a beat" * 50)


async def test_the_ping_of_a_link_that_is_gone_is_not_waited_for(server: EmbeddedServer, listener: Listener) -> None:
    liveness = ServerLiveness(listener.client)
    assert server.process is not None
    process = psutil.Process(server.process.pid)
    process.suspend()
    try:
        await until(lambda: not liveness.answers())
    finally:
        process.resume()
    liveness.reset()
    assert all(liveness.answers() for _ in range(QUIET))
