"""torchft's own clients, as training has them, at our lighthouse."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest

torchft = pytest.importorskip("torchft._torchft", reason="torchft is not installed: there are no replicas to serve")

from tests.lighthouse.conftest import Apart, Replica, Start, until  # noqa: E402

SECONDS = timedelta(seconds=20)


class Manager:
    """What rank 0 of a replica has of torchft: its server, and a client to it."""

    def __init__(self, id: str, lighthouse: str, retries: int = 0) -> None:
        self.id = id
        self.server = torchft.ManagerServer(
            replica_id=id, lighthouse_addr=lighthouse, hostname="127.0.0.1", bind="127.0.0.1:0", store_addr=f"{id}:1",
            world_size=1, heartbeat_interval=timedelta(milliseconds=50), connect_timeout=SECONDS,
            quorum_retries=retries,
        )  # fmt: skip
        self.client = torchft.ManagerClient(f"http://127.0.0.1:{self.server.address().rpartition(':')[2]}", SECONDS)

    async def quorum(self, step: int = 0, failures: int = 0, timeout: timedelta = SECONDS) -> Any:
        return await asyncio.to_thread(
            self.client._quorum, group_rank=0, step=step, checkpoint_metadata=f"of {self.id}", shrink_only=False,
            timeout=timeout, commit_failures=failures, init_sync=True,
        )  # fmt: skip


@pytest.fixture
def managers() -> Iterator[Callable[..., list[Manager]]]:
    made: list[Manager] = []

    def make(url: str, *ids: str, retries: int = 0) -> list[Manager]:
        made.extend(Manager(id, url, retries) for id in ids)
        return made[-len(ids) :]

    yield make
    for manager in made:
        manager.server.shutdown()


async def quorums(*managers: Manager, **more: int) -> list[Any]:
    return await asyncio.gather(*(manager.quorum(**more) for manager in managers))


async def alive(here: Any, *ids: str) -> None:
    await until(lambda: set(ids) <= set(here.service.state.heartbeats))


async def test_managers_train_together_and_one_heals(begin: Start, managers: Callable[..., list[Manager]]) -> None:
    async with begin() as here:
        a, b = await asyncio.to_thread(managers, here.url, "a:1", "b:2")
        await alive(here, "a:1", "b:2")
        first = await quorums(a, b)
        assert [(one.quorum_id, one.replica_rank, one.replica_world_size) for one in first] == [(1, 0, 2), (1, 1, 2)]
        assert [one.store_address for one in first] == ["a:1:1", "a:1:1"]
        again = await quorums(a, b, step=1)
        assert {one.quorum_id for one in again} == {1}
        behind, ahead = await asyncio.gather(a.quorum(step=1), b.quorum(step=5))
        assert (behind.heal, ahead.heal) == (True, False)
        assert behind.max_step == 5


async def test_a_failed_commit_makes_a_new_quorum(begin: Start, managers: Callable[..., list[Manager]]) -> None:
    async with begin() as here:
        a, b = await asyncio.to_thread(managers, here.url, "a:1", "b:2")
        await alive(here, "a:1", "b:2")
        await quorums(a, b)
        failed = await quorums(a, b, failures=1)
        assert {one.quorum_id for one in failed} == {2}


async def test_the_survivor_of_an_evicted_manager_goes_on(begin: Start, managers: Callable[..., list[Manager]]) -> None:
    async with begin() as here:
        a, b = await asyncio.to_thread(managers, here.url, "a:1", "b:2")
        await alive(here, "a:1", "b:2")
        await quorums(a, b)
        survivor = asyncio.create_task(a.quorum(step=1))
        await here.waits("a:1")
        here.service.evict(["b:2"], "dead")
        found = await survivor
        assert (found.quorum_id, found.replica_world_size) == (2, 1)
        with pytest.raises((RuntimeError, TimeoutError)):  # its manager keeps the reason to itself
            await b.quorum(step=1, timeout=timedelta(seconds=0.3))
        (c,) = await asyncio.to_thread(managers, here.url, "b:3")
        joins = asyncio.create_task(c.quorum())
        await here.waits("b:3")
        assert (await a.quorum(step=2)).quorum_id == (await joins).quorum_id == 3


async def test_an_evicted_client_is_told_why(begin: Start) -> None:
    async with begin() as here:
        here.service.evict(["a"])
        client = await asyncio.to_thread(torchft.LighthouseClient, here.url, SECONDS)
        with pytest.raises(RuntimeError, match="a was evicted from the job"):
            await asyncio.to_thread(client.quorum, "a", SECONDS)


async def test_what_a_script_adds_reaches_the_others(begin: Start) -> None:
    async with begin() as here:
        client = await asyncio.to_thread(torchft.LighthouseClient, here.url, SECONDS)
        found = await asyncio.to_thread(
            client.quorum,
            "a",
            SECONDS,
            address="http://h:1",
            store_address="h:2",
            step=7,
            world_size=2,
            data={"k": [1]},
        )
        (member,) = found.participants
        assert (member.address, member.store_address, member.step, member.world_size) == ("http://h:1", "h:2", 7, 2)
        assert member.data == {"k": [1]}
        assert found.created.seconds > 1_600_000_000


async def test_managers_outlive_a_kill_of_the_lighthouse(
    apart: Callable[..., Apart], managers: Callable[..., list[Manager]]
) -> None:
    lighthouse = apart()
    replica = Replica(lighthouse.url)
    for id in ("a:1", "b:2"):
        await replica.heartbeat(id)  # or the first would begin before the second is there
    await replica.channel.close()
    a, b = await asyncio.to_thread(managers, lighthouse.url, "a:1", "b:2", retries=299)
    first = await quorums(a, b, failures=1)
    number = max(one.quorum_id for one in first)
    waits = asyncio.create_task(a.quorum(step=1, failures=1))
    lighthouse.end()
    with contextlib.suppress(RuntimeError, TimeoutError):
        await asyncio.wait_for(asyncio.shield(waits), 0.2)
    lighthouse.start()
    after = [await b.quorum(step=1, failures=1), await waits]
    assert {one.quorum_id for one in after} == {number + 1}
    assert {one.replica_world_size for one in after} == {2}
