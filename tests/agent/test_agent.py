"""An agent does what a weaver says, here one that is played; server, supervisors and ranks are real."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest
from nats.aio.client import Client

from tests.agent.harness import SECONDS, lives, until
from tests.flow.plane import plane
from torchloom.agent.agent import COLD, Agent
from torchloom.agent.node import this_node
from torchloom.agent.supervisor.supervisor_client import SupervisorClient
from torchloom.bus.connection import connect, find
from torchloom.errors import AlreadyUp
from torchloom.protocol.codec import encode
from torchloom.protocol.job_spec import Task
from torchloom.protocol.node import Dismiss, Launch, NodeCommand, Place, RankStatus
from torchloom.protocol.subjects import NODE, TASK, Role
from torchloom.shared.incarnation import new_incarnation


class Told:
    """An agent, and the one who tells it what to do."""

    def __init__(self, agent: Agent, running: asyncio.Task[None], weaver: Client, folder: Path) -> None:
        self.agent = agent
        self.running = running
        self.weaver = weaver
        self.folder = folder

    async def tell(self, *commands: NodeCommand) -> None:
        for command in commands:
            await self.weaver.publish(TASK.to(node="n1"), encode(command))

    def launch(self, attempt: int, script: str = "pass", **settings: object) -> Launch:
        place = Place(rank=0, local=0, node="n1", incarnation=new_incarnation())
        task = Task(argv=("-c", script), cwd=str(self.folder), standby=False, **settings)  # type: ignore[arg-type]
        return Launch(
            term=1, job="mnist", attempt=attempt, task=task, places=(place,), host="127.0.0.1", port=1, ordinal=attempt
        )

    def printed(self, attempt: int) -> str:
        return self.agent.jobs["mnist"].attempts[attempt].log(0, "out").read_text()

    def rank(self, attempt: int) -> RankStatus | None:
        statuses = [status for status in self.agent.beat().attempts if status.attempt == attempt]
        assert not any(status.trouble for status in statuses), statuses
        return statuses[0].ranks[0] if statuses else None

    def done(self, attempt: int) -> bool:
        rank = self.rank(attempt)
        return rank is not None and rank.state == "ended" and rank.code == 0


@contextlib.asynccontextmanager
async def told(folder: Path, tied: bool = True) -> AsyncIterator[Told]:
    async with plane(folder / "state", weaver=False) as up:
        client = await connect(find(up.settings, Role.AGENT), name="agent n1")
        weaver = await connect(find(up.settings, Role.WEAVER), name="weaver")
        agent = Agent(client, this_node("n1"), folder / "jobs", tied=tied, preload=())
        beats = await weaver.subscribe(NODE.to(node="n1"))
        await weaver.flush()
        running = asyncio.create_task(agent.run())
        try:
            await beats.next_msg(timeout=60)  # it hears what it is told before it says anything
            yield Told(agent, running, weaver, folder)
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            await agent.close()
            await client.close()
            await weaver.close()


async def test_a_job_waits_until_the_supervisor_of_the_one_of_its_name_before_has_left(tmp_path: Path) -> None:
    async with told(tmp_path) as here:
        await here.tell(here.launch(1))
        await until(lambda: here.done(1))
        supervisor = psutil.Process(here.agent.jobs["mnist"].supervisors[COLD].state.pid)
        supervisor.suspend()
        await here.tell(Dismiss(term=1, job="mnist", attempt=1, last=True), here.launch(2))
        await until(lambda: here.rank(2) is not None)
        assert here.rank(1) is None
        await asyncio.sleep(0.3)
        waiting = here.rank(2)
        assert waiting is not None
        assert waiting.state == "starting"
        supervisor.resume()
        await until(lambda: here.done(2))
        assert not supervisor.is_running()


async def test_nothing_of_a_supervisor_is_left_when_its_job_is_over(tmp_path: Path) -> None:
    async with told(tmp_path) as here:
        await here.tell(here.launch(1))
        await until(lambda: here.done(1))
        assert (tmp_path / "jobs" / "mnist" / "supervisor").is_dir()
        await here.tell(Dismiss(term=1, job="mnist", attempt=1, last=True))
        await until(lambda: not (tmp_path / "jobs" / "mnist" / "supervisor").exists())
        assert here.agent.jobs == {}
        assert list((tmp_path / "jobs" / "mnist" / "logs").glob("*/attempt-1/rank-0.out"))


@contextlib.asynccontextmanager
async def taken_over(folder: Path) -> AsyncIterator[None]:
    """By another agent, which ends it."""
    other = await SupervisorClient.find(folder, None)
    try:
        yield
    finally:
        await other.dismiss()


async def test_an_agent_that_was_replaced_leaves_the_ranks_alone_and_says_so(tmp_path: Path) -> None:
    async with told(tmp_path, tied=False) as here:
        await here.tell(here.launch(1, "import time; time.sleep(600)"))
        await until(lambda: getattr(here.rank(1), "state", "") == "running")
        async with taken_over(tmp_path / "jobs" / "mnist" / COLD):
            with pytest.raises(AlreadyUp, match="another agent has taken over the ranks of mnist on n1"):
                await asyncio.wait_for(here.running, SECONDS)
            await here.agent.close()
            rank = here.rank(1)
            assert rank is not None
            assert (rank.state, lives(rank.pid)) == ("running", True)


async def test_a_start_that_another_agent_takes_over_is_not_reported_as_failed(tmp_path: Path) -> None:
    async with told(tmp_path, tied=False) as here:
        await here.tell(here.launch(1))
        await until(lambda: here.done(1))
        link = here.agent.jobs["mnist"].supervisors[COLD]
        supervisor = psutil.Process(link.state.pid)
        supervisor.suspend()
        await here.tell(here.launch(2, "import time; time.sleep(600)"))
        await until(lambda: bool(link._starts))
        asyncio.get_running_loop().call_soon(supervisor.resume)
        async with taken_over(link.folder):
            with pytest.raises(AlreadyUp):
                await asyncio.wait_for(here.running, SECONDS)
            rank = here.rank(2)
            assert rank is not None
            assert rank.state != "ended"


async def test_a_rank_gets_the_threads_that_its_job_asks_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    monkeypatch.delenv("MKL_NUM_THREADS", raising=False)
    show = "import os; print(os.environ['OMP_NUM_THREADS'], os.environ.get('MKL_NUM_THREADS'))"
    asked: dict[str, object] = {"threads_per_rank": 3}
    async with told(tmp_path) as here:
        for attempt, settings in enumerate(({}, asked, asked | {"env": {"MKL_NUM_THREADS": "2"}}), 1):
            await here.tell(here.launch(attempt, show, **settings))
            await until(lambda attempt=attempt: here.done(attempt))  # type: ignore[misc]
        assert [here.printed(attempt) for attempt in (1, 2, 3)] == ["7 None\n", "3 3\n", "3 2\n"]
