"""The probe reports the exit of real processes of lost ranks, and of no others."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator

import pytest
from msgspec.structs import replace

from tests.core.loom import Loom, life
from tests.core.site import Site
from torchloom.core.events import LinkClosed, ReportReceived
from torchloom.core.state.cluster import ClusterState
from torchloom.protocol.codec import decode_fact
from torchloom.protocol.facts import Fact, RankExited
from torchloom.protocol.ids import RankId
from torchloom.protocol.rank import Hello, Joined
from torchloom.protocol.records import RankFound
from torchloom.shared.process_id import process_id
from torchloom.weaver.process_exits import ProcessExitProbe

RANK = RankId("theirs", "r0", 0)
LIFE = life(1)


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
