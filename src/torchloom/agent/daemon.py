"""`loom agent`: serve the control plane on this node until it is asked to leave.

Ranks outlive their agent, and the next one adopts them: the folder of an attempt says how it was started, and the
supervisors, whose children the ranks are, say which still run. Under Slurm, which lends the node, ranks end with it.

Only one agent may serve a node. A lock on the folder shows a second one on this machine, beats of the same name show
one on another machine.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import msgspec
from nats.aio.msg import Msg

from torchloom.agent import log_files
from torchloom.agent.agent import BEAT_SECONDS, COLD, STANDBY, Agent, JobHere
from torchloom.agent.environment import RankPaths
from torchloom.agent.node import Node
from torchloom.agent.supervisor.child_processes import read_records
from torchloom.agent.supervisor.spare import remove_left
from torchloom.agent.supervisor.supervisor_client import SupervisorClient, SupervisorGone
from torchloom.bus.connection import close_quietly, connect, find
from torchloom.bus.tasks import end_all, on_stop_signal
from torchloom.errors import AlreadyUp, BadState, TorchLoomError, Unreachable
from torchloom.protocol.codec import decode_look_lines, decode_node_beat, encode
from torchloom.protocol.operator import No
from torchloom.protocol.phrase import phrase
from torchloom.protocol.subjects import LINES, NODE, Role
from torchloom.protocol.views import LinesView
from torchloom.settings import Settings
from torchloom.shared.files import open_locked
from torchloom.views.answers import rendered
from torchloom.views.wording.phrases import render

LOCK = "agent.lock"


async def serve(
    settings: Settings, node: Node, folder: Path, say: Callable[[str], None], tied: bool = False, spare: bool = True
) -> None:
    """Until SIGTERM or Ctrl-C. AlreadyUp if another agent serves this node."""
    with alone(folder, node.name):
        client = await connect(find(settings, Role.AGENT), name=f"agent {node.name}", keep_trying=True)
        try:
            paths = RankPaths(
                addr=settings.addr, state=str(settings.state_folder), interface=node.interface, node=node.name
            )
            hot = settings.device_temperature_celsius
            agent = Agent(client, node, folder / "jobs", tied=tied, shared=True, paths=paths, say=say, hot=hot)
            agent.folder.mkdir(exist_ok=True, mode=0o700)
            taken = await _listen(agent)
            await asyncio.sleep(1.5 * BEAT_SECONDS)  # another agent may have this name, here or elsewhere
            _refuse(taken, node.name)
            await remove_left(folder)
            if ranks := await adopt(agent):
                say(render(phrase("ranks_adopted", count=ranks)))
            gb, gpus = node.memory_mb / 1024, len(node.devices)
            say(render(phrase("agent_waits", node=node.name, host=node.host, cores=node.cores, gb=gb, gpus=gpus)))
            if spare:
                agent.keep_spare()
            try:
                left = await _run_until_signal(agent, taken)
            finally:
                await agent.close()
            if left:
                say(render(phrase("ranks_ended_with_agent" if tied else "ranks_continue", count=left)))
        finally:
            await close_quietly(client)


@contextlib.contextmanager
def alone(folder: Path, node: str) -> Iterator[None]:
    """Hold the lock of the folder."""
    try:
        for parent in reversed((folder, *folder.parents)):
            parent.mkdir(exist_ok=True, mode=0o700)
        lock = open_locked(folder / LOCK)
    except OSError as error:
        raise BadState(f"{folder} cannot be used: {error.strerror}", hint="--folder names another") from error
    if lock is None:
        raise AlreadyUp(f"an agent for {node} runs already, with {folder}", hint="--name gives another name")
    with os.fdopen(lock):
        yield


async def _listen(agent: Agent) -> asyncio.Future[str]:
    """Answer requests for output. The result is set if another agent serves this node."""
    taken: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def on_beat(message: Msg) -> None:
        with contextlib.suppress(msgspec.MsgspecError):
            beat = decode_node_beat(message.data)
            if beat.incarnation < agent.incarnation and not beat.leaving and not taken.done():  # the first one stays
                taken.set_result(f"{beat.host}, process {beat.pid}")

    await agent.client.subscribe(NODE.to(node=agent.node.name), cb=on_beat)
    await agent.client.subscribe(LINES.to(node=agent.node.name), cb=partial(_answer, agent))
    await agent.client.flush()
    return taken


async def _answer(agent: Agent, message: Msg) -> None:
    answer: LinesView | No
    try:
        look = decode_look_lines(message.data)
        answer = log_files.read(log_files.find(agent.folder, look, agent.node.name), look)
    except msgspec.MsgspecError as error:
        answer = rendered(No(why=phrase("not_understood", why=str(error))))
    except TorchLoomError as error:
        answer = No(why=error.message, hint=error.hint)
    await agent.client.publish(message.reply, encode(answer))


def _refuse(taken: asyncio.Future[str], node: str) -> None:
    if taken.done():
        raise AlreadyUp(f"another agent serves {node} already ({taken.result()})", hint="--name gives this one its own")


async def _run_until_signal(agent: Agent, taken: asyncio.Future[str]) -> int:
    """Returns how many ranks ran when the signal came."""
    leave: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    on_stop_signal(lambda: None if leave.done() else leave.set_result(None))
    running = asyncio.create_task(agent.run())
    try:
        await asyncio.wait((running, leave, taken), return_when=asyncio.FIRST_COMPLETED)
        if running.done():
            running.result()
        if not leave.done():
            _refuse(taken, agent.node.name)
        left = sum(status.state == "running" for attempt in agent.attempts for status in attempt.ranks.values())
        if agent.tied:
            await agent.depart()
        if agent.tied or not left:
            await agent.say_goodbye()
        return left
    finally:
        await end_all([running])


async def adopt(agent: Agent) -> int:
    """Take over the ranks of an earlier agent. Returns how many still run."""
    running = 0
    for folder in sorted(path for path in agent.folder.iterdir() if path.is_dir()):
        for launch, over in log_files.launches(folder):
            if not over:
                agent.hold(launch).expect(launch, agent.node.name)
        job = agent.jobs.get(folder.name) or JobHere(folder)
        for name in (COLD, STANDBY):
            running += await _take_over(job, name)
        for attempt in job.attempts.values():
            attempt.miss()
    return running


async def _take_over(job: JobHere, name: str) -> int:
    """Take over a supervisor of a job, or read in its files how its ranks ended. Returns how many ranks still run."""
    folder = job.folder / name
    try:
        link = await SupervisorClient.find(folder, job)
    except (Unreachable, SupervisorGone) as error:
        if isinstance(error, SupervisorGone) and error.replaced:
            raise
        link = None
    if not job.attempts:  # it is over
        if link is not None:
            await link.dismiss()
        shutil.rmtree(folder, ignore_errors=True)
        return 0
    if link is not None:
        job.supervisors[name] = link
    running = 0
    for record in read_records(folder).values() if link is None else link.state.kept:
        place = job.rank(record.begun.key)
        if record.ended is not None:
            job.rank_ended(record.ended)
        elif link is not None and place is not None:
            attempt, rank = place
            attempt.link = link
            attempt.runs(rank, record.begun)
            running += 1
    return running
