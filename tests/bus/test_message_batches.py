"""Messages that are taken in batches: all of them, in order, and no others."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from nats.aio.client import Client
from nats.aio.msg import Msg

from torchloom.bus.connection import connect, find
from torchloom.bus.message_batches import Batch, MessageBatches
from torchloom.bus.nats_server import EmbeddedServer
from torchloom.protocol.ids import RankId
from torchloom.protocol.subjects import ASK, BEAT, Role
from torchloom.settings import Settings

SUBJECTS = [BEAT.for_rank(RankId("job", "replica", number)) for number in range(4)]


@pytest.fixture
async def weaver(settings: Settings) -> AsyncIterator[Client]:
    client = await connect(find(settings, Role.WEAVER), name="test weaver", keep_trying=True)
    yield client
    await client.close()


@pytest.fixture
async def rank(settings: Settings) -> AsyncIterator[Client]:
    client = await connect(find(settings, Role.THREADLET), name="test rank", keep_trying=True)
    yield client
    await client.close()


class Listener:
    """Subscribes to beats, and counts those that nats-py's queue has passed on."""

    def __init__(self, client: Client) -> None:
        self.messages: list[tuple[str, bytes]] = []
        self.batches = 0
        self.queued = 0
        self._batches = MessageBatches(client, self._take)
        self._client = client

    async def subscribe(self) -> None:
        await self._client.subscribe(BEAT.pattern(), cb=self._on_message)
        await self._client.flush()
        await self._client.flush()  # the ping of the first may overtake the subscription in nats-py

    async def wait_for(self, count: int) -> None:
        async with asyncio.timeout(10):
            while len(self.messages) < count:
                await asyncio.sleep(0.01)

    async def _on_message(self, message: Msg) -> None:
        self.queued += 1
        await self._batches.on_message(message)

    def _take(self, batch: Batch) -> None:
        self.batches += 1
        for subject, data in batch:
            self.messages.append((subject, data))
            if data == b"error":
                raise ValueError("this one cannot be taken")


async def send(client: Client, messages: list[tuple[str, bytes]]) -> None:
    for subject, data in messages:
        await client.publish(subject, data)
    await client.flush()


async def test_all_messages_are_taken_in_order_and_only_the_first_is_queued(weaver: Client, rank: Client) -> None:
    listener = Listener(weaver)
    await listener.subscribe()
    await send(rank, [(SUBJECTS[0], b"first")])
    await listener.wait_for(1)
    messages = [(SUBJECTS[number % 4], b"%d" % number) for number in range(5000)]
    await send(rank, messages)
    await listener.wait_for(5001)
    assert listener.messages == [(SUBJECTS[0], b"first"), *messages]
    assert listener.queued == 1
    assert listener.batches < 2500


async def test_messages_that_arrive_with_the_first_one_are_taken_too(weaver: Client, rank: Client) -> None:
    listener = Listener(weaver)
    await listener.subscribe()
    messages = [(SUBJECTS[number % 4], b"%d" % number) for number in range(5000)]
    await send(rank, messages)
    await listener.wait_for(5000)
    assert listener.messages == messages


async def test_other_subscriptions_of_the_client_get_theirs_as_before(
    settings: Settings, weaver: Client, rank: Client
) -> None:
    async def answer(message: Msg) -> None:
        await message.respond(message.data + b" is answered")

    listener = Listener(weaver)
    await listener.subscribe()
    await weaver.subscribe(ASK.to(), cb=answer)
    await send(rank, [(SUBJECTS[0], b"1"), (SUBJECTS[0], b"2")])
    await listener.wait_for(2)
    await send(rank, [(SUBJECTS[0], b"3")])
    operator = await connect(find(settings, Role.OPERATOR), name="test operator")
    try:
        assert (await operator.request(ASK.to(), b"this", timeout=5)).data == b"this is answered"
    finally:
        await operator.close()
    await listener.wait_for(3)
    assert [data for _, data in listener.messages] == [b"1", b"2", b"3"]


async def test_an_error_with_one_message_loses_no_other(weaver: Client, rank: Client) -> None:
    errors: list[str] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(str(context["exception"])))
    listener = Listener(weaver)
    await listener.subscribe()
    await send(rank, [(SUBJECTS[0], data) for data in (b"1", b"error", b"2", b"error", b"3")])
    await listener.wait_for(5)
    assert [data for _, data in listener.messages] == [b"1", b"error", b"2", b"error", b"3"]
    assert errors == ["this one cannot be taken"] * 2


async def test_after_a_break_of_the_connection_messages_are_taken_as_before(
    server: EmbeddedServer, weaver: Client, rank: Client
) -> None:
    listener = Listener(weaver)
    await listener.subscribe()
    await send(rank, [(SUBJECTS[0], b"1")])
    await listener.wait_for(1)
    assert server.process
    server.process.kill()
    server.process.wait()
    server.start()
    async with asyncio.timeout(20):
        while len(listener.messages) < 2:  # what is sent before both are connected again is lost
            await rank.publish(SUBJECTS[0], b"2")
            await asyncio.sleep(0.1)
    assert listener.queued == 1
