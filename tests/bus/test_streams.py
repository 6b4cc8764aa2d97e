"""Reading a stream by direct get: whole, in order, past gaps, without hanging."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from itertools import pairwise

import pytest
from nats.aio.client import Client

from torchloom.bus import streams
from torchloom.bus.connection import connect, find
from torchloom.bus.nats_server import EmbeddedServer
from torchloom.bus.streams import extent, read_log
from torchloom.errors import Unreachable
from torchloom.protocol.subjects import Role
from torchloom.settings import Settings

STREAM = "LOOM_LOG"


@pytest.fixture
async def weaver(settings: Settings) -> AsyncIterator[Client]:
    client = await connect(find(settings, Role.WEAVER), name="test weaver")
    yield client
    await client.close()


@pytest.fixture
async def viewer(settings: Settings) -> AsyncIterator[Client]:
    client = await connect(find(settings, Role.VIEWER), name="test viewer", keep_trying=True)
    yield client
    await client.close()


async def fill(weaver: Client, messages: list[bytes]) -> None:
    js = weaver.jetstream()
    await js.add_stream(name=STREAM, subjects=["loom.log"], allow_direct=True)
    for message in messages:
        await js.publish("loom.log", message)


async def everything(client: Client, first: int = 1, **options: int) -> list[tuple[int, bytes]]:
    return [(stored.seq, stored.data) async for stored in read_log(client, STREAM, first, **options)]


async def test_a_viewer_reads_more_than_one_batch_in_order(weaver: Client, viewer: Client) -> None:
    count = streams.BATCH * 2 + 7
    await fill(weaver, [b"%d" % i for i in range(1, count + 1)])
    assert await everything(viewer) == [(i, b"%d" % i) for i in range(1, count + 1)]
    assert await everything(viewer, count - 1) == [(count - 1, b"%d" % (count - 1)), (count, b"%d" % count)]


async def test_a_batch_ending_with_the_stream_ends_the_reading(weaver: Client, viewer: Client) -> None:
    await fill(weaver, [b"x"] * streams.BATCH)
    assert len(await everything(viewer)) == streams.BATCH


async def test_last_is_included_and_nothing_after_it(weaver: Client, viewer: Client) -> None:
    await fill(weaver, [b"a", b"b", b"c", b"d"])
    assert await everything(viewer, 2, last=3) == [(2, b"b"), (3, b"c")]
    assert await everything(viewer, 4, last=3) == []


async def test_deleted_messages_are_passed_over_at_every_place(weaver: Client, viewer: Client) -> None:
    await fill(weaver, [b"%d" % i for i in range(1, 8)])
    for gone in (1, 4, 5, 7):
        await weaver.jetstream().delete_msg(STREAM, gone)
    assert [seq for seq, _ in await everything(viewer)] == [2, 3, 6]
    assert [seq for seq, _ in await everything(viewer, 4)] == [6]
    assert [seq for seq, _ in await everything(viewer, 1, last=5)] == [2, 3]
    assert [seq for seq, _ in await everything(viewer, 7)] == []


async def test_an_empty_stream_has_nothing(weaver: Client, viewer: Client) -> None:
    await fill(weaver, [])
    assert await everything(viewer) == []
    assert (await extent(viewer, STREAM)).last == 0


async def test_extent_says_first_and_last(weaver: Client, viewer: Client) -> None:
    await fill(weaver, [b"a", b"b", b"c"])
    await weaver.jetstream().delete_msg(STREAM, 1)
    assert await extent(viewer, STREAM) == (2, 3)


async def test_messages_larger_than_a_batch_may_be_are_still_read(
    weaver: Client, viewer: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams, "BATCH_BYTES", 1000)
    big = [bytes([65 + i]) * 5000 for i in range(4)]
    await fill(weaver, big)
    assert [data for _, data in await everything(viewer)] == big


async def test_no_stream_is_said_and_does_not_hang(weaver: Client, viewer: Client) -> None:
    with pytest.raises(Unreachable, match="no stream LOOM_LOG"):
        await everything(viewer)


async def test_a_closed_connection_is_said(weaver: Client, viewer: Client) -> None:
    await fill(weaver, [b"a"])
    await viewer.close()
    with pytest.raises(Unreachable, match="connection"):
        await everything(viewer)


async def test_reading_goes_on_over_a_killed_server(weaver: Client, viewer: Client, server: EmbeddedServer) -> None:
    count = streams.BATCH + 20
    await fill(weaver, [b"%d" % i for i in range(1, count + 1)])
    seen: list[int] = []
    async for seq, *_ in read_log(viewer, STREAM, 1, patience=10):
        seen.append(seq)
        if seq == streams.BATCH:
            assert server.process
            server.process.kill()
            server.process.wait()
            server.start()
            await asyncio.sleep(0.01)  # all this has held up the loop, in which the client notices the break
    assert seen == list(range(1, count + 1))


async def test_stopping_half_way_leaves_no_subscription(weaver: Client, viewer: Client) -> None:
    await fill(weaver, [b"a", b"b", b"c"])
    reading = read_log(viewer, STREAM, 1)
    assert (await anext(reading))[0] == 1
    await reading.aclose()  # type: ignore[attr-defined]
    assert not viewer._subs


async def test_others_have_their_turn_between_two_messages(weaver: Client, viewer: Client) -> None:
    await fill(weaver, [b"x"] * 50)
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    counting = asyncio.create_task(count())
    seen = [turns async for _ in read_log(viewer, STREAM, 1)]
    counting.cancel()
    assert len(seen) == 50
    assert all(before < after for before, after in pairwise(seen))
