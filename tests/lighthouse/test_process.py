"""A lighthouse as a process: killed and started again, with NATS and without, and how it is typed."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from nats.aio.client import Client

from tests.lighthouse.conftest import Apart, Replica, until
from torchloom.bus.connection import connect, find
from torchloom.bus.nats_server import EmbeddedServer
from torchloom.cli.main import main
from torchloom.protocol.codec import decode_lighthouse_beat, encode
from torchloom.protocol.lighthouse import Evict, LighthouseBeat
from torchloom.protocol.message import Message
from torchloom.protocol.subjects import EVICT, QUORUM, Role
from torchloom.settings import Settings

Make = Callable[..., Apart]


async def together(replica: Replica, *ids: str, failures: int = 0) -> object:
    await asyncio.gather(*(replica.heartbeat(id) for id in ids))
    answers = await asyncio.gather(*(replica.quorum(id, failures=failures) for id in ids))
    assert len(set(answers)) == 1
    return answers[0]


async def test_killed_again_and_again_it_never_gives_a_number_twice(apart: Make) -> None:
    lighthouse, url = apart(), ""
    for life in range(5):
        assert url in {"", lighthouse.url}, "replicas must find it where it was"
        url = lighthouse.url
        replica = Replica(url)
        assert await together(replica, "a", "b", failures=1) == (life + 1, ("a", "b"))
        await replica.channel.close()
        lighthouse.end(signal.SIGKILL)
        lighthouse.start()


async def test_killed_between_two_words_it_still_lets_nobody_go_on_alone(apart: Make) -> None:
    lighthouse = apart("--heartbeat-timeout-ms", "600")
    replica = Replica(lighthouse.url)
    assert await together(replica, "a", "b") == (1, ("a", "b"))
    lighthouse.end(signal.SIGKILL)
    lighthouse.start()
    last = asyncio.create_task(replica.quorum("a"))
    while not last.done():
        await replica.heartbeat("a")
        await asyncio.sleep(0.02)
    assert last.result() == (2, ("a",)), "b had its time, and was not heard"
    await replica.channel.close()


async def test_it_ends_when_told_and_says_where_it_listens(apart: Make) -> None:
    lighthouse = apart()
    assert lighthouse.process
    assert lighthouse.process.stdout
    assert "listens on 127.0.0.1 only" in lighthouse.process.stdout.readline()
    assert lighthouse.end(signal.SIGTERM) == 0


def test_there_is_no_torch_in_it() -> None:
    code = (
        "import sys, torchloom.lighthouse.main, torchloom.lighthouse.grpc_server, torchloom.lighthouse.nats_reporter\n"
        "sys.exit(bool({'torch', 'numpy'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


# ── on NATS ──────────────────────────────────────────────────────────────────────────────────────────────────────────


class Ear:
    """What the lighthouse tells."""

    def __init__(self) -> None:
        self.beats: list[LighthouseBeat] = []

    async def listen(self, settings: Settings) -> Client:
        client = await connect(find(settings, Role.WEAVER), name="test", keep_trying=True)

        async def on_beat(message: object) -> None:
            self.beats.append(decode_lighthouse_beat(message.data))  # type: ignore[attr-defined]

        await client.subscribe(QUORUM.to(job="job"), cb=on_beat)
        await client.flush()
        return client

    async def until(self, condition: Callable[[LighthouseBeat], object]) -> LighthouseBeat:
        await until(lambda: self.beats and condition(self.beats[-1]))
        return self.beats[-1]


def tell(client: Client, message: Message) -> object:
    return client.publish(EVICT.to(job="job"), encode(message))


async def test_it_evicts_whom_the_weaver_says_and_tells_what_came_of_it(apart: Make, settings: Settings) -> None:
    ear = Ear()
    client = await ear.listen(settings)
    lighthouse = apart("--min-replicas", "1", state=Path(settings.state))
    replica = Replica(lighthouse.url)
    first = await ear.until(lambda beat: beat.quorum == 0)
    assert first.address == lighthouse.url
    assert await together(replica, "a", "b") == (1, ("a", "b"))
    assert (await ear.until(lambda beat: beat.quorum == 1)).members == ("a", "b")
    survivor = asyncio.create_task(replica.quorum("a"))
    assert (await ear.until(lambda beat: beat.waiting)).waiting == ("a",)
    await tell(client, Evict(term=3, members=("b",), reason="killed by SIGKILL"))  # type: ignore[misc]
    assert await survivor == (2, ("a",))
    beat = await ear.until(lambda beat: beat.evicted)
    assert (beat.evicted, beat.broken, beat.members) == (("b",), (1,), ("a",))
    await client.publish(EVICT.to(job="job"), b"garbage")
    await tell(client, Evict(term=2, members=("a",)))  # type: ignore[misc]
    await tell(client, Evict(term=3, members=("c",)))  # type: ignore[misc]
    assert (await ear.until(lambda beat: len(beat.evicted) > 1)).evicted == ("b", "c"), "nothing by an old weaver"
    assert "not understood on loom.evict.job" in lighthouse.log.read_text()
    assert len({beat.incarnation for beat in ear.beats}) == 1
    await client.close()
    await replica.channel.close()


async def test_an_eviction_told_again_is_answered_with_a_beat(apart: Make, settings: Settings) -> None:
    ear = Ear()
    client = await ear.listen(settings)
    apart(state=Path(settings.state))
    await ear.until(lambda beat: True)
    for _ in range(3):
        await tell(client, Evict(term=1, members=("b",)))  # type: ignore[misc]
    assert (await ear.until(lambda beat: beat.evicted)).evicted == ("b",)
    await client.close()


async def test_it_does_not_take_its_own_end_for_that_of_nats(apart: Make, settings: Settings) -> None:
    ear = Ear()
    client = await ear.listen(settings)
    lighthouse = apart(state=Path(settings.state))
    await ear.until(lambda beat: True)
    assert lighthouse.end(signal.SIGTERM) == 0
    assert "NATS is gone" not in lighthouse.log.read_text()
    await client.close()


async def test_it_serves_while_nats_is_gone_and_speaks_when_it_is_back(
    apart: Make, settings: Settings, server: EmbeddedServer
) -> None:
    ear = Ear()
    client = await ear.listen(settings)
    lighthouse = apart(state=Path(settings.state))
    replica = Replica(lighthouse.url)
    await ear.until(lambda beat: True)
    assert server.process
    server.process.kill()
    server.process.wait()
    await until(lambda: "NATS is gone" in lighthouse.log.read_text())
    assert await together(replica, "a", "b") == (1, ("a", "b"))
    assert ear.beats[-1].quorum == 0
    server.start()
    assert (await ear.until(lambda beat: beat.quorum == 1)).members == ("a", "b")
    await until(lambda: client.is_connected)
    await tell(client, Evict(term=1, members=("b",)))  # type: ignore[misc]
    await ear.until(lambda beat: beat.evicted == ("b",))
    assert lighthouse.log.read_text().count("NATS is gone") == 1
    await client.close()
    await replica.channel.close()


async def test_it_serves_where_there_never_was_a_nats(apart: Make) -> None:
    lighthouse = apart(addr="nats://127.0.0.1:1")
    replica = Replica(lighthouse.url)
    assert await together(replica, "a", "b") == (1, ("a", "b"))
    await until(lambda: "no control plane answers" in lighthouse.log.read_text())
    assert "NATS is gone" not in lighthouse.log.read_text()
    await replica.channel.close()


# ── how it is typed ──────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def loom(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> Callable[..., tuple[int, str]]:
    def run(*words: str) -> tuple[int, str]:
        code = main(["--state", str(tmp_path / "state"), "lighthouse", *words])
        return code, capfd.readouterr().err

    return run


def test_what_cannot_be_meant(loom: Callable[..., tuple[int, str]]) -> None:
    assert loom()[0] == 2
    assert loom("--job", "a.b") == (
        2,
        "loom: job 'a.b' is not a name\n  → names have 1 to 128 characters out of A-Z a-z 0-9 _ : -\n",
    )
    assert "--min-replicas 0 is too small" in loom("--job", "j", "--min-replicas", "0")[1]
    assert "is not an address" in loom("--job", "j", "--bind", "here")[1]


def test_a_port_in_use_and_what_to_do(loom: Callable[..., tuple[int, str]]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        code, said = loom("--job", "j", "--bind", f"127.0.0.1:{port}")
    assert code == 5
    assert f"port {port} on 127.0.0.1 is in use" in said
    assert "→ stop that program, or choose another port" in said


def test_without_grpc_it_says_what_to_install(tmp_path: Path) -> None:
    code = "import sys; sys.modules['grpc'] = None\nfrom torchloom.cli.main import main; sys.exit(main(sys.argv[1:]))"
    words = ["lighthouse", "--job", "j", "--state", str(tmp_path)]
    ended = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True)
    assert ended.returncode == 1
    assert "pip install 'torchloom[lighthouse]'" in ended.stderr


async def test_what_it_keeps_can_be_read(apart: Make, tmp_path: Path) -> None:
    replica = Replica(apart().url)
    await together(replica, "a", "b")
    kept = json.loads((tmp_path / "state" / "lighthouses" / "job" / "quorum.json").read_text())
    assert kept == {"quorum": 1, "members": ["a", "b"]}
    await replica.channel.close()


def test_a_second_lighthouse_for_a_job_is_refused(apart: Make, loom: Callable[..., tuple[int, str]]) -> None:
    apart()
    code, said = loom("--job", "job", "--bind", "127.0.0.1:0")
    assert code == 5
    assert "another lighthouse has" in said
