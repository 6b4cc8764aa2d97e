"""The log: fenced, whole, and read back as it was."""

from __future__ import annotations

import zlib

import nats.errors
import pytest
from nats.aio.client import Client

import torchloom
from tests.damaged_json import damage
from torchloom.bus.connection import connect, find
from torchloom.bus.streams import read_log
from torchloom.core.state.cluster import FORMAT
from torchloom.errors import BadState, Fenced
from torchloom.protocol.codec import decode_entry, encode
from torchloom.protocol.ids import ReplicaId
from torchloom.protocol.phrase import phrase
from torchloom.protocol.records import DeviceRegistered, Entry, Record, TermBegan
from torchloom.protocol.subjects import Role
from torchloom.settings import Settings
from torchloom.views.wording.phrases import render
from torchloom.weaver.health import Clock, Health
from torchloom.weaver.storage import ENTRY_BYTES, Snapshot, Store

STREAM_OF = {"loom.log": "LOOM_LOG", "loom.snapshot": "LOOM_SNAPSHOT"}
# As the last version of format 1 encoded them.
FIRST_ENTRY = b'{"term":1,"at":1.0,"records":[{"is":"TermBegan","term":1,"weaver":"n1:7"}]}'
FIRST_INCIDENT = (
    b'{"term":1,"at":1.0,"records":[{"is":"IncidentOpened","id":"i1","what":"rank mnist/hi/0 is lost",'
    b'"subject":"mnist/hi/0","job":"mnist","decision":"wait 3 s for it to come back"}]}'
)
FIRST_SNAPSHOT = (
    b'{"seq":2,"state":{"format":1,"term":1,"inbox_seq":0,"incident_count":1,"jobs":[],"ranks":[],"devices":[],'
    b'"hand_seats":[],"incidents":[{"id":"i1","opened":1.0,"what":"rank mnist/hi/0 is lost","subject":"mnist/hi/0",'
    b'"job":"mnist","evidence":[],"decision":"wait 3 s for it to come back","reason":"","outcome":"","closed":null,'
    b'"kind":"","history":[[1.0,"decided: wait 3 s for it to come back"]],"stopped":null,"step":0,"lost_steps":null,'
    b'"lost_seconds":null}],"ledger":{"change_count":0,"order_count":0,"knobs":[],"checkpointers":[],"changes":[],'
    b'"orders":[]},"keeping":{"jobs":[]},"runs":{"runs":[],"drained":[]},"goodput":[],"evicted":[]}}'
)


def seated(number: int, padding: str = "") -> Record:
    return DeviceRegistered(device=f"GPU-{number}", replica=ReplicaId("j", "r"), operator=padding)


async def opened(settings: Settings) -> tuple[Client, Store]:
    client = await connect(find(settings, Role.WEAVER), name="test")
    store = Store(client, Health(Clock()))
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
    settings: Settings, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    client, store = await opened(settings)
    request = client.request

    async def request_unheard(*args: object, **kwargs: object) -> object:
        monkeypatch.undo()
        await request(*args, **kwargs)  # type: ignore[arg-type]
        raise nats.errors.TimeoutError

    monkeypatch.setattr(client, "request", request_unheard)
    await store.append(1, 1.0, [seated(1)])
    trouble = render(phrase("log_unwritable", why="nats: timeout"))
    assert caplog.messages == [trouble, f"mended: {trouble}"]
    assert not store.refusing
    assert [entry.at for entry in await entries(client)] == [1.0]
    await client.close()


async def test_many_records_are_split_into_messages_that_fit(settings: Settings) -> None:
    client, store = await opened(settings)
    await store.append(1, 1.0, [seated(n, "x" * 1000) for n in range(2000)])
    found = await entries(client)
    assert len(found) > 5
    assert all(len(encode(entry)) < ENTRY_BYTES * 1.1 for entry in found)
    cluster = await Store(client, Health(Clock())).load(settings)
    assert len(cluster.devices) == 2000
    await client.close()


async def test_a_damaged_snapshot_is_passed_over(settings: Settings) -> None:
    client, store = await opened(settings)
    await store.append(1, 1.0, [seated(1)])
    cluster = await store.load(settings)
    await store.write_snapshot(cluster.state())
    await client.jetstream().publish("loom.snapshot", b"not what it should be")
    for data in damage(encode(Snapshot(seq=store.seq + 1, state=cluster.state()))):
        await client.jetstream().publish("loom.snapshot", zlib.compress(data))
    again = await Store(client, Health(Clock())).load(settings)
    assert again.state() == cluster.state()
    await client.close()


async def test_a_log_cut_beyond_the_snapshot_is_refused_and_left_alone(settings: Settings) -> None:
    client, store = await opened(settings)
    for n in range(5):
        await store.append(1, float(n), [seated(n)])
    await client.jetstream().purge_stream("LOOM_LOG", seq=4)
    with pytest.raises(BadState, match="3 entries are missing"):
        await Store(client, Health(Clock())).load(settings)
    assert len(await entries(client)) == 2
    await client.close()


async def test_an_entry_that_cannot_be_read_is_refused_and_left_alone(settings: Settings) -> None:
    client, _ = await opened(settings)
    strange = b'{"term":1,"at":1.0,"records":[{"is":"FromTheFuture"}],"format":%d}' % FORMAT
    await client.jetstream().publish("loom.log", strange)
    with pytest.raises(BadState, match="log entry 1 cannot be read"):
        await Store(client, Health(Clock())).load(settings)
    await client.close()


@pytest.mark.parametrize(
    ("subject", "data", "format"),
    [
        ("loom.log", FIRST_ENTRY, 1),
        ("loom.log", FIRST_INCIDENT, 1),  # this version cannot even decode it
        ("loom.snapshot", zlib.compress(FIRST_SNAPSHOT), 1),
        ("loom.log", b'{"term":1,"records":[{"is":"FromTheFuture"}],"format":%d}' % (FORMAT + 1), FORMAT + 1),
        ("loom.snapshot", zlib.compress(b'{"seq":0,"state":{"format":%d}}' % (FORMAT + 1)), FORMAT + 1),
    ],
    ids=["entry", "entry with an incident", "snapshot", "newer entry", "newer snapshot"],
)
async def test_what_another_version_wrote_is_refused_with_both_versions_and_the_remedy(
    settings: Settings, subject: str, data: bytes, format: int
) -> None:
    client, _ = await opened(settings)
    await client.jetstream().publish(subject, data)
    with pytest.raises(BadState) as refusal:
        await Store(client, Health(Clock())).load(settings)
    assert f"in format {format}: torchLoom {torchloom.__version__} reads format {FORMAT}" in refusal.value.message
    assert str(settings.state_folder / "nats") in refusal.value.hint
    assert "loom up --state FOLDER" in refusal.value.hint
    assert [stored.data async for stored in read_log(client, STREAM_OF[subject], 1)] == [data]
    await client.close()


async def test_every_entry_and_snapshot_says_its_format(settings: Settings) -> None:
    client, store = await opened(settings)
    await store.append(1, 1.0, [seated(1)])
    await store.write_snapshot((await store.load(settings)).state())
    assert [entry.format for entry in await entries(client)] == [FORMAT]
    (snapshot,) = [stored.data async for stored in read_log(client, "LOOM_SNAPSHOT", 1)]
    assert b'"format":%d' % FORMAT in zlib.decompress(snapshot)
    await client.close()


async def test_a_replaced_weaver_cannot_overwrite_the_snapshot(settings: Settings) -> None:
    client, old = await opened(settings)
    await old.append(1, 1.0, [seated(1)])
    stale = (await old.load(settings)).state()
    other, new = await opened(settings)
    await new.append(2, 2.0, [seated(2)])
    cluster = await new.load(settings)
    await new.write_snapshot(cluster.state())
    await client.jetstream().purge_stream("LOOM_LOG")  # from here on only the snapshot knows
    await old.write_snapshot(stale)
    assert (await Store(client, Health(Clock())).load(settings)).state() == cluster.state()
    await client.close()
    await other.close()
