"""What the weaver observes by itself: a server that hangs, and the exit of real processes of lost ranks."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator

import psutil
import pytest
from msgspec.structs import replace
from nats.aio.client import Client
from nats.aio.msg import Msg

from tests.core.loom import Loom, life
from tests.core.site import Site
from torchloom.bus.connection import connect, find
from torchloom.bus.nats_server import EmbeddedServer
from torchloom.core.events import LinkClosed, ReportReceived
from torchloom.core.state.cluster import ClusterState
from torchloom.protocol.codec import decode_fact
from torchloom.protocol.facts import Fact, RankExited
from torchloom.protocol.ids import RankId
from torchloom.protocol.rank import Hello, Joined
from torchloom.protocol.records import RankFound
from torchloom.protocol.subjects import BEAT, Role
from torchloom.settings import Settings
from torchloom.shared.process_id import process_id
from torchloom.weaver.connection_monitor import QUIET, ProcessExitProbe, ServerLiveness

LOOK_SECONDS = 0.05
FLOOD = 40_000
SUBJECT = BEAT.to(job="j", replica="r", rank=0)
RANK = RankId("theirs", "r0", 0)
LIFE = life(1)


# ── a server that hangs is distinguished from a busy one, and the connection survives both ──


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


# ── the exit of a process of a lost rank is reported, and of no other ──


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    yield process
    process.kill()
    process.wait()


@pytest.fixture
def dead(child: subprocess.Popen[bytes]) -> str:
    """The name of a process that has ended."""
    name = process_id(child.pid)
    child.kill()
    child.wait()
    return name


def training(process: str, member: str = "r0:a") -> ClusterState:
    """A replica that torchLoom has not started."""
    loom = Loom()
    loom.happen(ReportReceived(RANK, Hello(incarnation=LIFE, node="n1", pid=1, devices=("GPU-1",), process=process)))
    if member:
        loom.happen(ReportReceived(RANK, Joined(incarnation=LIFE, member=member)))
    loom.happen(LinkClosed(RANK, LIFE, "1", "Client Closed"))
    return loom.cluster


async def told(cluster: ClusterState, rank: RankId = RANK) -> list[Fact]:
    """All that is said of a rank that was lost, until it is looked after no more."""
    facts: list[Fact] = []

    async def send(_: str, data: bytes) -> None:
        facts.append(decode_fact(data))

    probe = ProcessExitProbe(cluster, send, pauses=(0.0, 0.01))
    probe.watch(rank)
    await asyncio.gather(*probe.tasks)
    return facts


async def test_a_process_that_has_ended(dead: str) -> None:
    assert await told(training(dead)) == [RankExited(job="theirs", replica="r0", rank=0, incarnation=LIFE)]


async def test_a_process_that_lives_is_looked_after_until_it_ends(child: subprocess.Popen[bytes]) -> None:
    asked = asyncio.create_task(told(training(process_id(child.pid))))
    await asyncio.sleep(0.1)
    assert not asked.done()
    child.kill()
    child.wait()
    assert len(await asked) == 1


async def test_or_until_it_is_back(child: subprocess.Popen[bytes]) -> None:
    cluster = training(process_id(child.pid))
    asked = asyncio.create_task(told(cluster))
    await asyncio.sleep(0.1)
    cluster.fold([RankFound(rank=RANK, incarnation=LIFE, reason="a beat")], 2000.0)
    assert await asked == []


async def test_one_that_is_no_member_of_a_quorum_has_its_grace(dead: str) -> None:
    assert await told(training(dead, member="")) == []


async def test_one_that_did_not_say_which_process_it_is() -> None:
    assert await told(training("")) == []


async def test_one_that_was_forgotten_meanwhile() -> None:
    assert await told(Loom().cluster) == []


async def test_of_what_an_agent_has_started_the_agent_tells(dead: str) -> None:
    site = Site()
    site.submit()
    site.settle(1.0)
    cluster = site.loom.cluster
    (run,) = cluster.runs.by_name.values()
    place = run.places[0]
    rank = run.rank(place.rank)
    hello = Hello(incarnation=place.incarnation, node="n1", pid=1, devices=(), process=dead)
    site.loom.happen(ReportReceived(rank, hello))
    cluster.ranks[rank] = replace(cluster.ranks[rank], member="r0:a")
    assert await told(cluster, rank) == []
