"""`loom run`: submit a job, run it on this node with an agent of our own, show what it prints, end as it ends.

Launcher and agent are one process, and everything it starts dies with it. Where no control plane answers it brings its
own, in a folder that is removed afterwards.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

from torchloom.agent.agent import Agent
from torchloom.agent.environment import RankPaths
from torchloom.agent.log_files import stamp
from torchloom.agent.node import Node, this_node
from torchloom.bus.connection import close_quietly, connect, find
from torchloom.bus.nats_server import end_with_parent, stop_process
from torchloom.bus.tasks import end_all
from torchloom.bus.weaver_client import WeaverClient
from torchloom.errors import BadState, Unreachable
from torchloom.launcher.run_control import LaunchRequest, RunFollower
from torchloom.launcher.scratch_folder import scratch
from torchloom.protocol.subjects import Role
from torchloom.settings import Settings

UP_SECONDS = 20.0


async def run(settings: Settings, request: LaunchRequest) -> int:
    """Until the job is over; its exit code."""
    # As Ctrl-C, which takes away again what there is, until `follow` does better.
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, signal.raise_signal, signal.SIGINT)
    async with plane(settings) as here:
        if here is not settings:
            request.say(f"a control plane of its own: `loom --state {here.state} status` looks at it")
        node = this_node(name=request.task.node or "")
        async with agent_of(here, node, request, settings.device_temperature_celsius) as agent:
            follower = RunFollower(here, request, agent)
            agent.say = follower.say
            return await follower.follow()


@contextlib.asynccontextmanager
async def plane(settings: Settings) -> AsyncIterator[Settings]:
    """The control plane that is there, or one of our own for as long as this lasts."""
    if await _answers(settings):
        yield settings
        return
    with scratch("torchloom-run-") as folder:
        command = [sys.executable, "-P", "-m", "torchloom.cli.main", "--state", str(folder), "up", "--port", "0"]
        clean = {name: value for name, value in os.environ.items() if name not in {"TORCHLOOM_ADDR", "TORCHLOOM_CREDS"}}
        with (folder / "up.log").open("wb") as log:
            process = subprocess.Popen(  # noqa: ASYNC220  in this thread: it dies with it
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=clean,
                start_new_session=True, preexec_fn=end_with_parent(),  # noqa: PLW1509  no threads yet
            )  # fmt: skip
        try:
            own = Settings.from_env({"TORCHLOOM_STATE": str(folder)})
            end = time.monotonic() + UP_SECONDS
            while not await _answers(own):
                if process.poll() is not None or time.monotonic() > end:
                    last = (folder / "up.log").read_text(errors="replace").strip().splitlines()
                    raise BadState(f"no control plane came up: {last[-1] if last else 'it said nothing'}")
                await asyncio.sleep(0.02)
            yield own
        finally:
            await asyncio.to_thread(stop_process, process, 5.0)


async def _answers(settings: Settings) -> bool:
    try:
        async with WeaverClient(settings, Role.OPERATOR, timeout=1.0, connect_timeout=1.0) as weaver:
            await weaver.nodes()
    except (Unreachable, BadState):
        return False
    return True


@contextlib.asynccontextmanager
async def agent_of(settings: Settings, node: Node, request: LaunchRequest, hot: float) -> AsyncIterator[Agent]:
    client = await connect(find(settings, Role.AGENT), name=f"agent {node.name}", keep_trying=True)
    paths = RankPaths(addr=settings.addr, state=str(settings.state_folder))
    with scratch("torchloom-agent-") as folder:
        agent = Agent(client, node, folder, tied=True, paths=paths, say=request.say, hot=hot)
        running = asyncio.create_task(agent.run())
        try:
            yield agent
        finally:
            await end_all([running])
            await agent.close()
            await agent.say_goodbye()
            await close_quietly(client)


def output_folder(settings: Settings, job: str, now: float) -> Path:
    """Where the output of a run that begins now is kept."""
    settings.state_folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    return settings.state_folder / "runs" / job / stamp(now)
