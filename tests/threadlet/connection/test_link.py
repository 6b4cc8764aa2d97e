"""The link: it comes up, comes back, obeys, and says goodbye; on a real server, with a played weaver."""

from __future__ import annotations

import asyncio
import logging
import os
import random
import signal
import socket
import time
from dataclasses import replace

import pytest

from tests.threadlet.played import RANK, PlayedWeaver, until_true
from torchloom import Threadlet, attach
from torchloom.bus.connection import connect, find
from torchloom.bus.nats_server import EmbeddedServer, Listen
from torchloom.protocol.rank import Farewell, Goodbye, Hello, Introduce, Muted, Welcome
from torchloom.protocol.subjects import BEAT, Role
from torchloom.settings import Settings

OTHER_LIFE = "f" * 24


def join(settings: Settings, **options: object) -> Threadlet:
    return attach(RANK.job, RANK.replica, settings=settings, **options)  # type: ignore[arg-type]


async def leave(threadlet: Threadlet) -> float:
    """Close it, off the loop the played weaver lives on; how long that took."""
    began = time.monotonic()
    await asyncio.to_thread(threadlet.close)
    return time.monotonic() - began


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


async def test_a_hello_says_who_where_and_on_what(weaver: PlayedWeaver, lively: Settings) -> None:
    loom = join(lively, world_size=4, devices=["GPU-1", "GPU-2"])
    hello = await weaver.report(Hello)
    assert hello.devices == ("GPU-1", "GPU-2")
    assert (hello.incarnation, hello.pid, hello.world_size) == (loom.incarnation, os.getpid(), 4)
    assert hello.node == socket.gethostname()
    assert loom.connected


async def test_a_rank_without_a_gpu_is_on_its_hosts_cpu(
    weaver: PlayedWeaver, lively: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    join(lively)
    assert (await weaver.report(Hello)).devices[0].startswith("CPU-")


async def test_beats_tell_steps_loss_and_metrics(weaver: PlayedWeaver, lively: Settings) -> None:
    loom = join(lively)
    for _ in range(3):
        loom.step(loss=0.5, samples=8, accuracy=0.9, broken=float("nan"), text="no number")
    beat = await weaver.beat(lambda beat: beat.step == 3 and beat.loss is not None)
    assert (beat.loss, beat.metrics, beat.not_finite, beat.dropped) == (0.5, {"accuracy": 0.9}, ("broken",), 1)
    assert sum(beat.times.count for beat in weaver.beats if beat.times) == 2  # some may have been in an earlier beat
    assert beat.rss_mb > 1


async def test_a_value_that_cannot_be_reported_is_warned_of_once(
    weaver: PlayedWeaver, lively: Settings, caplog: pytest.LogCaptureFixture
) -> None:
    loom = join(lively)
    for i in range(3):
        loom.step(text=f"no number {i}")
        await weaver.beat(lambda beat, step=i + 1: beat.dropped >= step)
    assert len([text for text in warnings(caplog) if "not reported" in text]) == 1


async def test_a_link_comes_up_by_itself_when_the_server_comes_later(
    server: EmbeddedServer, lively: Settings, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    server.stop()
    loom = join(lively)
    await until_true(lambda: warnings(caplog), "the warning")
    assert not loom.connected
    server.start()
    await until_true(lambda: loom.connected, "the link")
    assert len(warnings(caplog)) == 1
    assert "no control plane answers at nats://" in warnings(caplog)[0]
    assert "training continues" in warnings(caplog)[0]
    assert any("back" in record.getMessage() for record in caplog.records)


async def test_a_server_that_moves_to_another_port_is_found_there(server: EmbeddedServer, lively: Settings) -> None:
    loom = join(lively)
    await until_true(lambda: loom.connected, "the link")
    before = server.listen.port
    server.stop()
    with socket.socket() as squatter:  # the old port is taken: only the endpoint file tells the new one
        squatter.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        squatter.bind(("127.0.0.1", before))
        server.listen = Listen(port=0)
        server.start()
        assert server.listen.port != before
        await until_true(lambda: loom.connected, "the link")


async def test_after_a_killed_server_is_back_the_rank_says_hello_again(
    server: EmbeddedServer, weaver: PlayedWeaver, lively: Settings
) -> None:
    loom = join(lively)
    first = await weaver.report(Hello)
    loom.step(step=41)
    assert server.process
    server.process.send_signal(signal.SIGKILL)
    server.process.wait()
    await until_true(lambda: not loom.connected, "the loss of the link")
    server.start()
    again = await weaver.report(Hello, 1)
    assert again.incarnation == first.incarnation
    assert again.step == 41
    count = len(weaver.beats)
    await until_true(lambda: len(weaver.beats) > count, "a beat after the restart")


async def test_beats_flow_while_nobody_keeps_the_inbox_and_the_hello_is_stored_when_someone_does(
    settings: Settings, lively: Settings
) -> None:
    client = await connect(find(settings, Role.WEAVER), name="played weaver")
    beats: list[bytes] = []

    async def hear(message: object) -> None:
        beats.append(message.data)  # type: ignore[attr-defined]

    await client.subscribe(BEAT.pattern(), cb=hear)
    await client.flush()
    join(lively)
    await until_true(lambda: beats, "a beat")
    late = PlayedWeaver(client)
    await late.begin()
    await late.report(Hello)
    await client.close()


async def test_the_weaver_sets_the_pace_of_beats_and_an_older_weaver_does_not(
    weaver: PlayedWeaver, settings: Settings
) -> None:
    loom = join(replace(settings, beat_seconds=600.0))
    await weaver.report(Hello)
    life = loom.incarnation
    await weaver.say(b"\xff{garbage")
    await weaver.say(b'{"is":"Explode","term":9}')
    await weaver.say(Welcome(term=2, incarnation=life, beat_seconds=600.0))
    await weaver.say(Welcome(term=2, incarnation=OTHER_LIFE, beat_seconds=0.01))
    await weaver.say(Welcome(term=1, incarnation=life, beat_seconds=0.01))
    await weaver.say(Introduce(term=2, incarnation=life))
    await weaver.report(Hello, 1)  # all of the above was heard
    assert weaver.beats == []
    await weaver.say(Welcome(term=2, incarnation=life, beat_seconds=0.02))
    await weaver.beat()


async def test_a_rank_that_is_not_known_introduces_itself_again(weaver: PlayedWeaver, lively: Settings) -> None:
    loom = join(lively)
    await weaver.report(Hello)
    await weaver.say(Introduce(term=1, incarnation=loom.incarnation))
    assert (await weaver.report(Hello, 1)).incarnation == loom.incarnation


async def test_a_new_life_on_a_machine_whose_clock_is_behind_joins_as_a_newer_one(
    weaver: PlayedWeaver, lively: Settings
) -> None:
    loom = join(lively)
    first = (await weaver.report(Hello)).incarnation
    newest = f"{int(first[:12], 16) + 3_600_000:012x}{'f' * 12}"
    await weaver.say(Muted(term=1, incarnation=first, newest=newest, pid=7, node="n2"))
    second = (await weaver.report(Hello, 1)).incarnation
    assert second > newest
    assert loom.incarnation == second


async def test_a_life_that_was_welcomed_and_is_muted_falls_silent_and_training_goes_on(
    weaver: PlayedWeaver, lively: Settings, caplog: pytest.LogCaptureFixture
) -> None:
    loom = join(replace(lively, goodbye_seconds=60.0))
    await weaver.report(Hello)
    await weaver.say(Welcome(term=1, incarnation=loom.incarnation, beat_seconds=0.02))
    await weaver.say(Muted(term=1, incarnation=loom.incarnation, newest=OTHER_LIFE, pid=7, node="n2"))
    await until_true(lambda: not loom.connected, "the silence")
    assert len(warnings(caplog)) == 1
    assert "pid 7 on n2" in warnings(caplog)[0]
    loom.step(loss=1.0)
    count = len(await weaver.reports())
    assert await leave(loom) < 30
    assert len(await weaver.reports()) == count


async def test_a_goodbye_is_stored_before_close_returns_and_nothing_follows_it(
    weaver: PlayedWeaver, lively: Settings
) -> None:
    weaver.farewells = False
    loom = join(replace(lively, goodbye_seconds=60.0, beat_seconds=600.0))
    await weaver.report(Hello)
    loom.step(loss=0.25, step=7)
    closing = asyncio.create_task(leave(loom))
    goodbye = await weaver.report(Goodbye)
    assert (goodbye.how, goodbye.error, goodbye.step) == ("finished", "", 7)
    assert [beat.loss for beat in weaver.beats] == [0.25]  # what was not told yet goes before it
    assert not closing.done()
    await weaver.say(Farewell(term=1, incarnation=goodbye.incarnation))
    assert await closing < 30
    loom.step(loss=1.0)
    assert await leave(loom) < 30
    assert len(await weaver.reports()) == 2


async def test_a_life_shorter_than_its_link_takes_to_come_up_is_still_told(
    weaver: PlayedWeaver, lively: Settings
) -> None:
    await leave(join(replace(lively, goodbye_seconds=60.0)))
    assert [type(report) for report in await weaver.reports()] == [Hello, Goodbye]


@pytest.mark.parametrize(
    ("error", "how"), [(ValueError("boom"), "failed"), (KeyboardInterrupt(), "interrupted"), (SystemExit(2), "failed")]
)
async def test_a_context_tells_how_it_was_left(
    weaver: PlayedWeaver, lively: Settings, error: BaseException, how: str
) -> None:
    def train() -> None:
        with pytest.raises(type(error)), join(replace(lively, goodbye_seconds=60.0)):
            raise error

    await asyncio.to_thread(train)
    assert (await weaver.report(Goodbye)).how == how


async def test_attaching_again_after_a_goodbye_is_a_new_life(weaver: PlayedWeaver, lively: Settings) -> None:
    first = join(lively)
    old = first.incarnation
    await leave(first)
    second = join(lively)
    assert second is not first
    assert second.incarnation > old
    await until_true(lambda: second.connected, "the link")


async def test_attaching_twice_is_the_same_threadlet(
    weaver: PlayedWeaver, lively: Settings, caplog: pytest.LogCaptureFixture
) -> None:
    first = join(lively)
    assert join(lively) is first
    assert "already" in warnings(caplog)[0]
    assert attach(RANK.job, "another", settings=lively) is not first


async def test_a_link_leaves_the_global_random_state_alone(weaver: PlayedWeaver, lively: Settings) -> None:
    url = str(find(lively, Role.THREADLET))
    before = random.getstate()
    loom = join(replace(lively, addr=f"{url},{url.replace('127.0.0.1', 'localhost')}"))
    await weaver.report(Hello)
    await leave(loom)
    assert random.getstate() == before


async def test_the_loop_knows_the_socket_of_its_connection(
    weaver: PlayedWeaver, lively: Settings, caplog: pytest.LogCaptureFixture
) -> None:
    """Fails with a nats-py that no longer connects through its event loop: forked children would keep the socket."""
    loom = join(lively)
    await weaver.report(Hello)
    assert loom._link is not None
    (sock,) = loom._link._loop.sockets
    assert sock.getpeername()[1] == int(str(find(lively, Role.THREADLET)).rpartition(":")[2])
    assert warnings(caplog) == []
