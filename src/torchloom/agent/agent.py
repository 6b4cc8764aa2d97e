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
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import nats.errors
from nats.aio.client import Client
from nats.aio.msg import Msg

from torchloom.agent.attempt import Attempt
from torchloom.agent.environment import Ways, rank_environment
from torchloom.agent.link import Gone, KeeperGone, KeeperLink, Keeping
from torchloom.agent.logs import log_folder
from torchloom.agent.node import Node
from torchloom.agent.preparing import prepare
from torchloom.agent.spare import Spare, how_to_keep
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
FAREWELL_SECONDS = 1.0
"""For the weaver to take note of the last ends."""
PRELOAD = ("torch", "torch._dynamo", "torch.distributed", "torchloom.threadlet.threadlet")
STANDBY_DELAY = 2.0
"""Seconds between the start of an attempt and the beginning of the import for the next: the ranks import now."""


COLD, STANDBY = "keeper", "standby"
"""The folders of a job's keepers."""
Opening = Callable[[Callable[[Ended], None], Callable[[Gone], None]], Coroutine[Any, Any, KeeperLink]]


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
        shared: bool = False,
        ways: Ways | None = None,
        preload: tuple[str, ...] = PRELOAD,
        say: Callable[[str], None] = logger.info,
    ) -> None:
        self.client = client
        self.node = node
        self.folder = folder
        self.tied = tied
        """What it starts dies with it."""
        self.shared = shared
        """It runs anyone's jobs, and not only that of the one who started it."""
        self.departing = False
        self.ways = ways or Ways("")
        self.preload = preload
        self.say = say
        self.jobs: dict[str, JobHere] = {}
        self.launched: Callable[[Attempt], None] = lambda _: None
        """Told of every attempt whose ranks are started here."""
        self.spare: Spare | None = None
        """A keeper that has imported torch and waits for a job."""
        self._owners: dict[KeeperLink, JobHere] = {}
        """Whose keepers are now that were nobody's when they were started."""
        self.incarnation = new_incarnation()
        self._term = 0
        self._leaving = False
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
                async with asyncio.timeout(BEAT_SECONDS):  # wait_for (3.11) may swallow that we are cancelled
                    await self._news.wait()

    def beat(self) -> NodeBeat:
        links = [job.standby for job in self.jobs.values()]
        standby = [link for link in links if link is not None and not link.state.preloading]
        return NodeBeat(
            incarnation=self.incarnation,
            host=self.node.host,
            cores=self.node.cores,
            memory_mb=self.node.memory_mb,
            devices=self.node.devices,
            pid=os.getpid(),
            tied=self.tied and not self.shared,
            leaving=self.departing,
            standby_mb=int(sum(link.state.memory_mb for link in standby) + (self.spare.memory_mb if self.spare else 0)),
            attempts=tuple(attempt.status() for job in self.jobs.values() for attempt in job.attempts.values()),
        )

    async def _on_task(self, message: Msg) -> None:
        try:
            command = decode_node_command(message.data)
        except msgspec.MsgspecError as error:
            logger.warning("not understood: %s", error)
            return
        if command.term < self._term or self._leaving:
            return
        self._term = command.term
        self._obey(command)

    def _obey(self, command: NodeCommand) -> None:
        job = self.jobs.get(command.job)
        attempt = job.attempts.get(command.attempt) if job is not None else None
        match command:
            case Prepare() | Launch() if self.departing:
                return
            case Prepare() if attempt is None:
                self._spawn(self._prepare(command))
            case Launch() if attempt is None or attempt.launch is None:
                self._launch(command)
            case Halt(grace_seconds=grace) if attempt is not None:
                if attempt.ranks:
                    attempt.halt(grace)
            case Dismiss(last=last) if job is not None and attempt is not None and (attempt.over or not attempt.ranks):
                attempt.forget()
                del job.attempts[command.attempt]
                if last and not job.attempts:
                    self._spawn(self._let_go(command.job))
                self._news.set()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # ── attempts ──

    def hold(self, command: Prepare | Launch) -> Attempt:
        """The attempt that a command is about."""
        here = self.jobs.setdefault(command.job, JobHere(self.folder / command.job))
        number = command.attempt
        if number not in here.attempts:
            logs = log_folder(here.folder, command)
            here.attempts[number] = Attempt(
                command.job, number, here.folder / f"attempt-{number}", logs, self._news.set
            )
        return here.attempts[number]

    async def _prepare(self, command: Prepare) -> None:
        attempt = self.hold(command)
        attempt.prepared = await asyncio.to_thread(prepare, command.task, self.node.host)
        self._news.set()

    def _launch(self, command: Launch) -> None:
        attempt = self.hold(command)
        attempt.expect(command, self.node.name)
        self.launched(attempt)
        self._spawn(self._start(command, attempt))

    async def _start(self, command: Launch, attempt: Attempt) -> None:
        job = self.jobs[command.job]
        places = [place for place in command.places if place.node == self.node.name]
        python = command.task.python or sys.executable
        base = _passed_on(self.say)
        try:
            link = await self._keeper(job, command)
            await attempt.start(command, places, link, python, base, self.ways)
        except Exception as error:  # noqa: BLE001  whatever it is, the weaver must hear that nothing is started here
            attempt.trouble = getattr(error, "message", "") or f"{type(error).__name__}: {error}"
            attempt.ranks = {}
            self._news.set()
            return
        cold = any(not rank.warm for rank in attempt.ranks.values())
        if command.task.standby and job.standby is None and job.awaited is None and places and cold:
            env = rank_environment(base, command, places[0], self.ways)
            job.awaited = asyncio.get_running_loop().create_task(self._make_standby(job, command, python, env))

    async def _keeper(self, job: JobHere, command: Launch) -> KeeperLink:
        """The standby, if there is one that is ready; else one that starts fresh interpreters."""
        if job.standby is not None and command.task.standby and not job.standby.state.preloading:
            return job.standby
        if job.cold is None and command.task.standby and self.spare is not None:
            job.cold = self.spare.take(job.folder / COLD)
            if job.cold is not None:
                self._owners[job.cold] = job
        if job.cold is None:
            how = Keeping(tied=self.tied, cwd=command.task.cwd or None)
            job.cold = await self.link(job, partial(KeeperLink.start, job.folder / COLD, how))
        return job.cold

    async def _make_standby(self, job: JobHere, command: Launch, python: str, env: dict[str, str]) -> None:
        """A process that imports torch now, so that ranks of the next attempt need not."""
        try:
            await asyncio.sleep(STANDBY_DELAY)
            modules = tuple(dict.fromkeys((*self.preload, *command.task.preload)))
            how = Keeping(tied=self.tied, preload=modules, python=python, env=env, cwd=command.task.cwd or None)
            job.standby = link = await self.link(job, partial(KeeperLink.start, job.folder / STANDBY, how))
            state = await link.settled()
            if state.why_cold:
                self.say(f"{command.job}: no standby: {state.why_cold}")
            self._news.set()
        except (TorchLoomError, OSError) as error:
            self.say(f"{command.job}: no standby: {getattr(error, 'message', '') or error}")

    def keep_spare(self) -> None:
        """From now on, have a process ready for whatever job comes."""

        def open(folder: Path, how: Keeping) -> Coroutine[Any, Any, KeeperLink]:
            return self.link(JobHere(folder), partial(KeeperLink.start, folder, how))

        how = how_to_keep(self.preload, self.tied, crowded=(len(self.node.devices) or self.node.cores) > 1)
        self.spare = Spare(self.folder.parent, open, how, self.say)

    async def link(self, job: JobHere, open: Opening) -> KeeperLink:
        """To a keeper of this job, started or found; what it tells reaches the attempts."""
        held: list[KeeperLink] = []

        def owner() -> JobHere:
            return self._owners.get(held[0], job) if held else job

        def ended(end: Ended) -> None:
            number, _, rank = end.key.partition("-")
            if not number.isdecimal() or not rank.isdecimal():
                return  # not one of ours
            attempt = owner().attempts.get(int(number))
            if attempt is not None and int(rank) in attempt.ranks:
                attempt.ended(int(rank), end)

        def gone(obituary: Gone) -> None:
            job = owner()
            for attempt in job.attempts.values():
                if attempt.link in held:
                    attempt.lost(obituary)
            if job.cold in held:
                job.cold = None
            if job.standby in held:
                job.standby = None
                job.awaited = None
            if held:
                self._owners.pop(held[0], None)

        link = await open(ended, gone)
        held.append(link)
        return link

    async def _let_go(self, name: str) -> None:
        """The job is over: its keepers are not needed any more."""
        job = self.jobs.pop(name)
        if self.shared:
            self.say(f"{name} is over")
        if job.awaited is not None:
            job.awaited.cancel()
            await asyncio.gather(job.awaited, return_exceptions=True)
        for link in (job.cold, job.standby):
            if link is not None:
                with contextlib.suppress(KeeperGone):
                    await link.dismiss()

    # ── leaving ──

    async def depart(self) -> None:
        """End all ranks in order, while the weaver is told; returns when it has taken note of that, or does not."""
        self.departing = True
        attempts = [attempt for job in self.jobs.values() for attempt in job.attempts.values()]
        for attempt in attempts:
            attempt.halt(attempt.launch.task.grace_seconds if attempt.launch is not None else 0.0)
        self._news.set()
        halting = [attempt.halting for attempt in attempts if attempt.halting is not None]
        await asyncio.gather(*halting, return_exceptions=True)  # each ends with the grace
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FAREWELL_SECONDS):
                while any(job.attempts for job in self.jobs.values()):
                    await asyncio.sleep(0.02)

    async def say_goodbye(self) -> None:
        """Nothing runs here, and nothing more is to be started here."""
        self.departing = True
        with contextlib.suppress(nats.errors.Error, OSError):
            await self.client.publish(NODE.to(node=self.node.name), encode(self.beat()))
            await self.client.flush(1)

    async def close(self, *, kill: bool) -> None:
        """Stop talking; with `kill`, nothing of what was started stays."""
        self._leaving = True
        if self.spare is not None:
            await self.spare.close()
        begun = [*self._tasks, *(job.awaited for job in self.jobs.values() if job.awaited is not None)]
        for task in begun:
            task.cancel()
        await asyncio.gather(*begun, return_exceptions=True)  # or they would start what nobody ends
        for job in self.jobs.values():
            for link in (job.cold, job.standby):
                if link is not None:
                    with contextlib.suppress(KeeperGone):
                        await (link.dismiss() if kill else link.close())
            if kill:
                for attempt in job.attempts.values():
                    shutil.rmtree(attempt.folder, ignore_errors=True)


def _passed_on(say: Callable[[str], None]) -> dict[str, str]:
    """The environment of this process, as far as it is text: with anything else no rank could be started."""
    known = {name: value for name, value in os.environ.items() if (name + value).isascii() or _is_text(name + value)}
    for name in sorted(os.environ.keys() - known.keys()):
        say(f"the variable {name!a} is not passed on: it is not UTF-8")
    return known


def _is_text(value: str) -> bool:
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True
