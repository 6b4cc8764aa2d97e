"""The door for alerts, on real sockets and a real nats-server: who may come in, what is stored, what is answered."""

from __future__ import annotations

import asyncio
import contextlib
import json
import ssl
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.core.loom import life
from tests.damaged_json import damage
from torchloom.bus.connection import connect, find
from torchloom.bus.nats_server import EmbeddedServer
from torchloom.bus.state_folder import StateFolder
from torchloom.bus.streams import read_log
from torchloom.bus.tls import ensure_tls
from torchloom.core.state.cluster import ClusterState
from torchloom.errors import BadInput, BadState
from torchloom.protocol.codec import decode_fact
from torchloom.protocol.facts import DeviceFailed, DeviceRecovered
from torchloom.protocol.node import NodeBeat
from torchloom.protocol.phrase import phrase
from torchloom.protocol.subjects import INBOX_STREAM, Role
from torchloom.settings import Settings
from torchloom.shared.addresses import split_url
from torchloom.weaver.alert_webhook import MOST_CONNECTIONS, Ingress, ensure_token, last_place, read_token
from torchloom.weaver.health import Clock, Health
from torchloom.weaver.http_server import BODY_BYTES
from torchloom.weaver.storage import Store

FIXTURES = Path(__file__).parent.parent / "fixtures"
FIRING = (FIXTURES / "alertmanager_firing.json").read_bytes()
RESOLVED = (FIXTURES / "alertmanager_resolved.json").read_bytes()
GPU = "GPU-307a982d-bf2b-4cc3-64e3-aae456bf6a28"


class Door:
    """An ingress that listens, and someone who knocks."""

    def __init__(self, ingress: Ingress, settings: Settings, client: Any) -> None:
        self.ingress = ingress
        self.settings = settings
        self.client = client
        self.health = ingress._health
        self.cluster = ingress._cluster

    @property
    def port(self) -> int:
        return split_url(self.ingress.url)[1]

    async def raw(self, data: bytes, tls: ssl.SSLContext | None = None) -> tuple[int, str]:
        """Send these bytes; the status and the text of the answer."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port, ssl=tls)
        try:
            writer.write(data)
            with contextlib.suppress(ConnectionError):
                await writer.drain()
            head, _, body = (await reader.read()).partition(b"\r\n\r\n")
            return int(head.split()[1]), body.decode()
        finally:
            writer.close()

    async def post(
        self, body: bytes, token: str | None = "", path: str = "/alertmanager", tls: ssl.SSLContext | None = None
    ) -> tuple[int, str]:
        carried = f"Authorization: Bearer {token or read_token(self.settings)}\r\n" if token is not None else ""
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\n{carried}Content-Length: {len(body)}\r\n\r\n"
        return await self.raw(head.encode() + body, tls)

    async def stored(self) -> list[Any]:
        return [decode_fact(letter.data) async for letter in read_log(self.client, INBOX_STREAM.name, 1)]


@contextlib.asynccontextmanager
async def opened(settings: Settings, slow_seconds: float = 10.0) -> AsyncIterator[Door]:
    client = await connect(find(settings, Role.WEAVER), name="weaver", keep_trying=True)
    try:
        await Store(client, Health(Clock())).open()
        ingress = Ingress(settings, client, ClusterState(settings), Health(Clock()))
        ingress.slow_seconds = slow_seconds
        await ingress.open()
        try:
            yield Door(ingress, settings, client)
        finally:
            await ingress.close()
    finally:
        await client.close()


@pytest.fixture
async def door(settings: Settings) -> AsyncIterator[Door]:
    async with opened(settings) as door:
        yield door


def post(*labels: dict[str, str], status: str = "firing", began: str = "2026-11-15T18:57:07.632Z") -> bytes:
    alerts = [{"status": status, "labels": found, "startsAt": began} for found in labels]
    return json.dumps({"version": "4", "alerts": alerts}).encode()


def has(*devices: str) -> NodeBeat:
    return NodeBeat(incarnation=life(1), host="10.0.0.7", cores=8, memory_mb=1, devices=devices)


# ── what is stored ──


async def test_an_alert_is_on_disk_when_it_is_answered(door: Door) -> None:
    door.cluster.runtime.hear_node("node7", has(GPU), 0.0)
    assert await door.post(FIRING) == (200, "stored: 1 fact about devices\n")
    (fact,) = await door.stored()
    assert isinstance(fact, DeviceFailed)
    assert (fact.device, fact.alert) == (GPU, "b1252eee80b0e499")


async def test_what_is_posted_again_and_again_is_one_fact(door: Door) -> None:
    for _ in range(5):
        assert (await door.post(FIRING))[0] == 200
    assert len(await door.stored()) == 1


async def test_an_alert_that_fires_again_after_its_end_is_told_again(door: Door) -> None:
    for body in (FIRING, RESOLVED, RESOLVED, FIRING, FIRING, RESOLVED):
        assert (await door.post(body))[0] == 200
    assert [type(fact) for fact in await door.stored()] == [DeviceFailed, DeviceRecovered] * 2


async def test_an_alert_about_a_machine_means_all_its_devices_and_so_does_its_end(door: Door) -> None:
    door.cluster.runtime.hear_node("node7", has("GPU-1", "GPU-2"), 0.0)
    labels = {"alertname": "NodeGone", "torchloom": "fail", "Hostname": "node7.example.org"}
    assert await door.post(post(labels)) == (200, "stored: 2 facts about devices\n")
    assert [fact.device for fact in await door.stored()] == ["GPU-1", "GPU-2"]
    assert (await door.post(post(labels, status="resolved")))[0] == 200
    assert [type(fact) for fact in await door.stored()] == [DeviceFailed] * 2 + [DeviceRecovered] * 2


async def test_an_alert_about_nothing_that_is_known_is_counted_and_changes_nothing(door: Door) -> None:
    body = post({"alertname": "DiskFull", "severity": "critical", "device": "sda", "instance": "node7:9100"})
    why = "DiskFull: it names no device and no machine that is known"
    assert await door.post(body) == (200, f"stored: 0 facts about devices\n{why}\n")
    assert list(door.health.refused) == ["alert DiskFull: it names no device and no machine that is known"]
    assert await door.stored() == []


async def test_an_alert_about_a_device_that_is_not_known_is_answered_so(door: Door) -> None:
    status, text = await door.post(post(*({"alertname": "Xid", "severity": "critical", "uuid": GPU},) * 2))
    assert status == 200
    assert text.splitlines()[1:] == [f"Xid: it names a device that is not known, {GPU} (2 alerts)"]


async def test_alerts_that_do_not_say_how_bad_they_are_are_answered_so(door: Door) -> None:
    status, text = await door.post(post({"alertname": "Xid", "uuid": GPU}))
    assert (status, text.splitlines()[0]) == (200, "stored: 0 facts about devices")
    assert "severity=critical" in text


async def test_without_nats_the_answer_is_to_try_again_and_then_nothing_is_lost(
    door: Door, server: EmbeddedServer
) -> None:
    server.stop()
    status, text = await door.post(FIRING)
    assert status == 503
    assert "try again" in text
    server.start()
    async with asyncio.timeout(60):
        while (await door.post(FIRING))[0] != 200:
            await asyncio.sleep(0.05)
    assert len(await door.stored()) == 1


# ── who may come in ──


@pytest.mark.parametrize("token", [None, "wrong", "Bearer", "\xe9" * 43])
async def test_without_the_token_nothing_is_looked_at(door: Door, token: str | None) -> None:
    status, text = await door.post(FIRING, token=token)
    assert status == 401
    assert "loom token ingress" in text
    assert await door.stored() == []


async def test_the_token_is_private_and_stays_what_it_was(door: Door) -> None:
    path = StateFolder(door.settings.state_folder).ingress_token
    assert path.stat().st_mode & 0o777 == 0o600
    assert ensure_token(door.settings) == read_token(door.settings)
    assert len(read_token(door.settings)) >= 40


async def test_a_token_of_ones_own_is_read_from_its_file(settings: Settings, tmp_path: Path) -> None:
    given = tmp_path / "own.token"
    given.write_text("  a token of one's own\n")
    async with opened(replace(settings, ingress_token=str(given))) as door:
        assert (await door.post(FIRING, token="a token of one's own"))[0] == 200
    assert not StateFolder(settings.state_folder).ingress_token.exists()


@pytest.mark.parametrize("text", ["", "short", "sixteen letters \N{SNOWMAN}"])
def test_what_is_no_token_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "token").write_text(text)
    with pytest.raises(BadState, match="holds no token"):
        read_token(Settings(ingress_token=str(tmp_path / "token")))


async def test_a_weaver_without_a_token_goes_on_and_says_why_there_are_no_alerts(settings: Settings) -> None:
    async with opened(replace(settings, ingress_token="/nowhere/token")) as door:
        assert door.ingress.trouble == phrase("no_alerts_taken", why="there is no file /nowhere/token")
        assert door.ingress.url == ""


# ── what is not wanted ──


async def test_garbage_is_refused_with_a_sentence_and_changes_nothing(door: Door) -> None:
    status, text = await door.post(b'{"version": "4", "alerts": [{"status": "smouldering"}]}')
    assert status == 400
    assert text.startswith("this is not what Alertmanager posts: ")
    assert await door.stored() == []


async def test_what_is_not_http_is_told_so(door: Door) -> None:
    assert (await door.raw(b"\x16\x03\x01 hello\r\n\r\n"))[0] == 400


async def test_a_body_that_is_too_large_is_refused_whether_it_says_so_or_not(door: Door) -> None:
    assert (await door.post(b"x" * (BODY_BYTES + 1)))[0] == 413
    head = f"POST /alertmanager HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {read_token(door.settings)}\r\n"
    announced = f"Content-Length: {BODY_BYTES + 1}\r\n\r\n"
    assert (await door.raw((head + announced).encode()))[0] == 413  # before any of it is there
    chunk = b"%x\r\n%s\r\n" % (BODY_BYTES + 1, b"x" * (BODY_BYTES + 1))
    assert (await door.raw(head.encode() + b"Transfer-Encoding: chunked\r\n\r\n" + chunk + b"0\r\n\r\n"))[0] == 413


async def test_an_endless_head_is_refused(door: Door) -> None:
    assert (await door.raw(b"POST /alertmanager HTTP/1.1\r\nX: " + b"x" * 100_000))[0] in {400, 431}


async def test_who_asks_whether_to_go_on_is_told_to(door: Door) -> None:
    """As curl does with a large body."""
    reader, writer = await asyncio.open_connection("127.0.0.1", door.port)
    head = f"POST /alertmanager HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {read_token(door.settings)}\r\n"
    writer.write(f"{head}Content-Length: {len(FIRING)}\r\nExpect: 100-continue\r\n\r\n".encode())
    assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 100 ")
    writer.write(FIRING)
    assert (await reader.read()).startswith(b"HTTP/1.1 200 ")
    writer.close()


async def test_other_places_and_methods_are_named(door: Door) -> None:
    assert await door.raw(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n") == (200, "ok\n")
    assert (await door.post(FIRING, path="/elsewhere"))[0] == 404
    assert (await door.raw(b"GET /alertmanager HTTP/1.1\r\nHost: x\r\n\r\n"))[0] == 405


async def test_who_is_slow_is_cut_off(settings: Settings) -> None:
    async with opened(settings, slow_seconds=0.1) as door:
        assert (await door.raw(b"POST /alertmanager HTTP/1.1\r\nHost: x\r\n"))[0] == 408


async def test_there_is_room_for_so_many_at_once_and_then_again(door: Door) -> None:
    waiting = [await asyncio.open_connection("127.0.0.1", door.port) for _ in range(MOST_CONNECTIONS)]
    async with asyncio.timeout(60):
        while len(door.ingress._tasks) < MOST_CONNECTIONS:
            await asyncio.sleep(0)
    assert (await door.post(FIRING))[0] == 503
    for _, writer in waiting:
        writer.close()
    async with asyncio.timeout(60):
        while (await door.post(FIRING))[0] != 200:
            await asyncio.sleep(0.01)


# ── where it listens ──


async def test_the_port_stays_what_it_was(settings: Settings) -> None:
    async with opened(settings) as door:
        first = door.ingress.url
        assert last_place(StateFolder(settings.state_folder)) == first
        assert first.startswith("http://127.0.0.1:")
    async with opened(settings) as door:
        assert door.ingress.url == first


async def test_the_address_is_kept_in_the_form_of_earlier_versions(settings: Settings) -> None:
    async with opened(settings) as door:
        kept = StateFolder(settings.state_folder).ingress.read_bytes()
        assert json.loads(kept) == {"url": door.ingress.url}


@pytest.mark.parametrize("data", damage(b'{"url":"http://127.0.0.1:1"}'))
def test_a_damaged_note_of_the_address_counts_as_none(tmp_path: Path, data: bytes) -> None:
    folder = StateFolder(tmp_path)
    folder.ingress.write_bytes(data)
    assert last_place(folder) == ""


async def test_a_port_that_is_taken_is_waited_for(settings: Settings) -> None:
    async with opened(settings) as before, opened(settings) as after:
        assert after.ingress.trouble
        assert after.ingress.url == ""
        where = before.ingress.url
        await before.ingress.close()
        async with asyncio.timeout(60):
            while after.ingress.url != where:
                await asyncio.sleep(0.05)
        assert not after.ingress.trouble
        assert (await after.post(FIRING))[0] == 200


@pytest.mark.parametrize("host", ["0.0.0.0", "10.0.0.1", "::"])
async def test_beyond_this_machine_it_listens_only_with_tls(settings: Settings, host: str) -> None:
    with pytest.raises(BadInput, match="without TLS"):
        async with opened(replace(settings, ingress_host=host)):
            pass


async def test_half_a_certificate_is_none(settings: Settings) -> None:
    with pytest.raises(BadInput, match="belong together"):
        async with opened(replace(settings, ingress_cert="x.pem")):
            pass


async def test_with_a_certificate_it_listens_everywhere(settings: Settings) -> None:
    folder = StateFolder(settings.state_folder)
    cert, key = ensure_tls(folder, "0.0.0.0")
    wide = replace(settings, ingress_host="0.0.0.0", ingress_cert=str(cert), ingress_key=str(key))
    trust = ssl.create_default_context(cafile=str(folder.tls / "ca.pem"))
    async with opened(wide) as door:
        assert door.ingress.url.startswith("https://0.0.0.0:")
        assert (await door.post(FIRING, tls=trust))[0] == 200
        assert len(await door.stored()) == 1
