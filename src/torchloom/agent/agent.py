"""An agent: runs the ranks of a node as the weaver tells it to, and says what is.

The weaver says what should be and says it again until the agent's beats show that it is so; so every command here is
one that may come twice. Ranks live in keepers: one for each job that starts them with a fresh interpreter, and, once
they run, one that has imported torch ahead, from which the next attempt is forked.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import sys
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import nats.errors
from nats.aio.client import Client
from nats.aio.msg import Msg

from torchloom.agent.attempt import Attempt
from torchloom.agent.environment import Ways, rank_environment
from torchloom.agent.link import Gone, KeeperGone, KeeperLink, Keeping
from torchloom.agent.node import Node
from torchloom.agent.preparing import prepare
from torchloom.agent.words import Ended
from torchloom.errors import TorchLoomError
from torchloom.messages import (
    Dismiss,
    Halt,
    Launch,
    NodeBeat,
    NodeCommand,
    Prepare,
    decode_node_command,
    encode,
)
from torchloom.subjects import NODE, TASK
from torchloom.threadlet.incarnation import new_incarnation

logger = logging.getLogger("torchloom.agent")
BEAT_SECONDS = 1.0
PRELOAD = ("torch", "torch._dynamo", "torch.distributed")
STANDBY_DELAY = 2.0
"""Seconds between the start of an attempt and the beginning of the import for the next: the ranks import now."""


@dataclass
class JobHere:
    """What this node holds of one job."""

    folder: Path
    attempts: dict[int, Attempt] = field(default_factory=dict)
    cold: KeeperLink | None = None
    standby: KeeperLink | None = None
    awaited: asyncio.Task[None] | None = None
    """The standby that is being prepared."""


class Agent:
    def __init__(
        self,
        client: Client,
        node: Node,
        folder: Path,
        *,
        tied: bool,
        ways: Ways | None = None,
        preload: tuple[str, ...] = PRELOAD,
        say: Callable[[str], None] = logger.info,
    ) -> None:
        self.client = client
        self.node = node
        self.folder = folder
        self.tied = tied
        self.ways = ways or Ways("")
        self.preload = preload
        self.say = say
        self.jobs: dict[str, JobHere] = {}
        self.incarnation = new_incarnation()
        self._term = 0
        self._news = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()

    # ── talking ──

    async def run(self) -> None:
        """Until cancelled."""
        await self.client.subscribe(TASK.to(node=self.node.name), cb=self._on_task)
        await self.client.flush()
        while True:
            self._news.clear()
            with contextlib.suppress(nats.errors.Error):
                await self.client.publish(NODE.to(node=self.node.name), encode(self.beat()))
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._news.wait(), BEAT_SECONDS)

    def beat(self) -> NodeBeat:
        standby = [job.standby for job in self.jobs.values() if job.standby is not None]
        return NodeBeat(
            incarnation=self.incarnation,
            host=self.node.host,
            cores=self.node.cores,
            memory_mb=self.node.memory_mb,
            devices=self.node.devices,
            pid=os.getpid(),
            standby_mb=int(sum(link.state.memory_mb for link in standby)),
            attempts=tuple(attempt.status() for job in self.jobs.values() for attempt in job.attempts.values()),
        )

    async def _on_task(self, message: Msg) -> None:
        try:
            command = decode_node_command(message.data)
        except msgspec.MsgspecError as error:
            logger.warning("not understood: %s", error)
            return
        if command.term < self._term:
            return
        self._term = command.term
        self._obey(command)

    def _obey(self, command: NodeCommand) -> None:
        job = self.jobs.get(command.job)
        attempt = job.attempts.get(command.attempt) if job is not None else None
        match command:
            case Prepare() if attempt is None:
                self._spawn(self._prepare(command))
            case Launch() if attempt is None or attempt.launch is None:
                self._launch(command)
            case Halt(grace_seconds=grace) if attempt is not None:
                if attempt.ranks:
                    attempt.halt(grace)
            case Dismiss() if job is not None and attempt is not None and (attempt.over or not attempt.ranks):
                attempt.forget()
                del job.attempts[command.attempt]
                self._news.set()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # ── attempts ──

    def _hold(self, job: str, number: int, log_dir: str) -> Attempt:
        here = self.jobs.setdefault(job, JobHere(self.folder / job))
        if number not in here.attempts:
            base = Path(log_dir) if log_dir else here.folder / "logs"
            here.attempts[number] = Attempt(
                job, number, here.folder / f"attempt-{number}", base / f"attempt-{number}", self._news.set
            )
        return here.attempts[number]

    async def _prepare(self, command: Prepare) -> None:
        attempt = self._hold(command.job, command.attempt, command.task.log_dir)
        attempt.prepared = await asyncio.to_thread(prepare, command.task, self.node.host)
        self._news.set()

    def _launch(self, command: Launch) -> None:
        attempt = self._hold(command.job, command.attempt, command.task.log_dir)
        attempt.launch = command
        self._spawn(self._start(command, attempt))

    async def _start(self, command: Launch, attempt: Attempt) -> None:
        job = self.jobs[command.job]
        places = [place for place in command.places if place.node == self.node.name]
        python = command.task.python or sys.executable
        base = dict(os.environ)
        try:
            link = await self._keeper(job, command)
            await attempt.start(command, places, link, python, base, self.ways)
        except (TorchLoomError, OSError) as error:
            attempt.trouble = getattr(error, "message", "") or str(error)
            attempt.ranks = {}
            self._news.set()
            return
        if command.task.standby and job.standby is None and job.awaited is None and places:
            env = rank_environment(base, command, places[0], self.ways)
            job.awaited = asyncio.get_running_loop().create_task(self._make_standby(job, command, python, env))

    async def _keeper(self, job: JobHere, command: Launch) -> KeeperLink:
        """The standby, if there is one that is ready; else one that starts fresh interpreters."""
        if job.standby is not None and command.task.standby and not job.standby.state.preloading:
            return job.standby
        if job.cold is None:
            how = Keeping(tied=self.tied, cwd=command.task.cwd or None)
            job.cold = await self._open(job, job.folder / "keeper", how)
        return job.cold

    async def _make_standby(self, job: JobHere, command: Launch, python: str, env: dict[str, str]) -> None:
        """A process that imports torch now, so that ranks of the next attempt need not."""
        try:
            await asyncio.sleep(STANDBY_DELAY)
            how = Keeping(tied=self.tied, preload=self.preload, python=python, env=env, cwd=command.task.cwd or None)
            link = await self._open(job, job.folder / "standby", how)
            state = await link.settled()
            if state.why_cold:
                self.say(f"{command.job}: no standby: {state.why_cold}")
            job.standby = link
            self._news.set()
        except (TorchLoomError, OSError) as error:
            self.say(f"{command.job}: no standby: {getattr(error, 'message', '') or error}")

    async def _open(self, job: JobHere, folder: Path, how: Keeping) -> KeeperLink:
        held: list[KeeperLink] = []

        def ended(end: Ended) -> None:
            number, _, rank = end.key.partition("-")
            attempt = job.attempts.get(int(number))
            if attempt is not None and int(rank) in attempt.ranks:
                attempt.ended(int(rank), end)

        def gone(obituary: Gone) -> None:
            for attempt in job.attempts.values():
                if attempt.link in held:
                    attempt.lost(obituary)
            if job.cold in held:
                job.cold = None
            if job.standby in held:
                job.standby = None
                job.awaited = None

        link = await KeeperLink.start(folder, how, ended, gone)
        held.append(link)
        return link

    # ── leaving ──

    async def close(self, *, kill: bool) -> None:
        """Stop talking; with `kill`, nothing of what was started stays."""
        for job in self.jobs.values():
            if job.awaited is not None:
                job.awaited.cancel()
            for link in (job.cold, job.standby):
                if link is not None:
                    with contextlib.suppress(KeeperGone):
                        await (link.dismiss() if kill else link.close())
            if kill:
                for attempt in job.attempts.values():
                    shutil.rmtree(attempt.folder, ignore_errors=True)
