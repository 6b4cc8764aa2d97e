"""The log: fenced, whole, and read back as it was."""

from __future__ import annotations

import zlib

import nats.errors
import pytest
from nats.aio.client import Client

from torchloom.bus.client import connect, find
from torchloom.bus.log import read_log
from torchloom.core.fabric import FORMAT
from torchloom.errors import BadState, Fenced
from torchloom.messages import DeviceSeated, Entry, Record, ReplicaId, TermBegan, decode_entry, encode
from torchloom.settings import Settings
from torchloom.subjects import Role
from torchloom.weaver.store import ENTRY_BYTES, Store


def seated(number: int, padding: str = "") -> Record:
    return DeviceSeated(device=f"GPU-{number}", replica=ReplicaId("j", "r"), operator=padding)


async def opened(settings: Settings) -> tuple[Client, Store]:
    client = await connect(find(settings, Role.WEAVER), name="test")
    store = Store(client)
    await store.open()
    await store.load(settings)
    return client, store


async def entries(client: Client) -> list[Entry]:
    return [decode_entry(stored.data) async for stored in read_log(client, "LOOM_LOG", 1)]


async def test_a_weaver_that_was_replaced_cannot_append(settings: Settings) -> None:
    client, old = await opened(settings)
    await old.append(1, 1.0, [TermBegan(term=1, weaver="old")])
    other, new = await opened(settings)
    await new.append(2, 2.0, [TermBegan(term=2, weaver="new")])
    with pytest.raises(Fenced):
        await old.append(1, 3.0, [seated(1)])
    assert [entry.term for entry in await entries(client)] == [1, 2]
    await client.close()
    await other.close()


async def test_an_entry_stored_but_not_acknowledged_is_neither_doubled_nor_a_fence(settings: Settings) -> None:
    client, store = await opened(settings)
    await store.append(1, 1.0, [TermBegan(term=1, weaver="w")])
    data = encode(Entry(term=1, at=2.0, records=(seated(1),)))
    await client.jetstream().publish("loom.log", data)  # our first attempt; the answer got lost
    await store._append(data)
    await store.append(1, 3.0, [seated(2)])
    assert [entry.at for entry in await entries(client)] == [1.0, 2.0, 3.0]
    await client.close()


async def test_a_lost_acknowledgement_is_trouble_only_until_the_entry_is_found(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, store = await opened(settings)
    complaints: list[str] = []
    store.complain = complaints.append
    publish = store._js.publish

    async def publish_unheard(*args: object, **kwargs: object) -> object:
        monkeypatch.undo()
        await publish(*args, **kwargs)  # type: ignore[arg-type]
        raise nats.errors.TimeoutError

    monkeypatch.setattr(store._js, "publish", publish_unheard)
    await store.append(1, 1.0, [seated(1)])
    assert [text[:25] for text in complaints] == ["the log cannot be written", ""]
    assert not store.refusing
    assert [entry.at for entry in await entries(client)] == [1.0]
    await client.close()


async def test_many_records_are_split_into_messages_that_fit(settings: Settings) -> None:
    client, store = await opened(settings)
    await store.append(1, 1.0, [seated(n, "x" * 1000) for n in range(2000)])
    found = await entries(client)
    assert len(found) > 5
    assert all(len(encode(entry)) < ENTRY_BYTES * 1.1 for entry in found)
    fabric = await Store(client).load(settings)
    assert len(fabric.devices) == 2000
    await client.close()


async def test_a_damaged_snapshot_is_passed_over(settings: Settings) -> None:
    client, store = await opened(settings)
    await store.append(1, 1.0, [seated(1)])
    fabric = await store.load(settings)
    await store.write_snapshot(fabric.state())
    await client.jetstream().publish("loom.snapshot", b"not what it should be")
    again = await Store(client).load(settings)
    assert again.state() == fabric.state()
    await client.close()


async def test_a_log_cut_beyond_the_snapshot_is_refused_and_left_alone(settings: Settings) -> None:
    client, store = await opened(settings)
    for n in range(5):
        await store.append(1, float(n), [seated(n)])
    await client.jetstream().purge_stream("LOOM_LOG", seq=4)
    with pytest.raises(BadState, match="3 entries are missing"):
        await Store(client).load(settings)
    assert len(await entries(client)) == 2
    await client.close()


async def test_an_entry_of_a_newer_version_is_refused_and_left_alone(settings: Settings) -> None:
    client, _ = await opened(settings)
    await client.jetstream().publish("loom.log", b'{"term":1,"at":1.0,"records":[{"is":"FromTheFuture"}]}')
    with pytest.raises(BadState, match="log entry 1 cannot be read"):
        await Store(client).load(settings)
    await client.close()


async def test_a_state_of_a_newer_format_is_refused(settings: Settings) -> None:
    client, _ = await opened(settings)
    newer = b'{"seq":0,"state":{"format":%d}}' % (FORMAT + 1)
    await client.jetstream().publish("loom.snapshot", zlib.compress(newer))
    with pytest.raises(BadState, match="format"):
        await Store(client).load(settings)
    await client.close()


async def test_a_replaced_weaver_cannot_overwrite_the_snapshot(settings: Settings) -> None:
    client, old = await opened(settings)
    await old.append(1, 1.0, [seated(1)])
    stale = (await old.load(settings)).state()
    other, new = await opened(settings)
    await new.append(2, 2.0, [seated(2)])
    fabric = await new.load(settings)
    await new.write_snapshot(fabric.state())
    await client.jetstream().purge_stream("LOOM_LOG")  # from here on only the snapshot knows
    await old.write_snapshot(stale)
    assert (await Store(client).load(settings)).state() == fabric.state()
    await client.close()
    await other.close()
