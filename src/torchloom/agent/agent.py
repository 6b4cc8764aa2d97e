"""An agent: runs the ranks of a node as the weaver commands, and reports what runs.

The weaver repeats each command until the agent's beats show that it is carried out, so every command here may arrive
twice. Ranks are children of supervisors. A job has one that starts them with a fresh interpreter, and, once they run, a
second one that has imported torch, from which the next attempt is forked.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path

import msgspec
import nats.errors
from msgspec.structs import replace
from nats.aio.client import Client
from nats.aio.msg import Msg

from torchloom.agent.attempt import Attempt
from torchloom.agent.environment import RankPaths, passed_on, rank_environment
from torchloom.agent.log_files import log_folder
from torchloom.agent.monitor.gpu_health import GpuHealth
from torchloom.agent.monitor.pressure import read_pressure
from torchloom.agent.monitor.stacks import inspect, watch
from torchloom.agent.node import Node
from torchloom.agent.node_check.checks import NodeCheckService
from torchloom.agent.port_and_checkpoint import prepare
from torchloom.agent.supervisor.protocol import Ended
from torchloom.agent.supervisor.spare import Spare
from torchloom.agent.supervisor.supervisor_client import Gone, SupervisorClient, SupervisorOptions
from torchloom.bus.streams import store_once
from torchloom.bus.tasks import TaskSet, end_all, set_within
from torchloom.core.detect.hang import spans
from torchloom.errors import AlreadyUp, TorchLoomError
from torchloom.protocol.codec import decode_node_command, encode
from torchloom.protocol.node import AttemptStatus, Dismiss, Examine, Halt, Inspect, Launch, NodeBeat, Prepare
from torchloom.protocol.phrase import phrase
from torchloom.protocol.subjects import FACT, NODE, TASK
from torchloom.settings import Settings
from torchloom.shared.incarnation import new_incarnation
from torchloom.views.wording.phrases import render

logger = logging.getLogger("torchloom.agent")
BEAT_SECONDS = 1.0
FAREWELL_SECONDS = 1.0
"""For the weaver to acknowledge the last ends."""
PRELOAD = ("torch", "torch._dynamo", "torch.distributed", "torchloom.threadlet.threadlet")
STANDBY_DELAY = 2.0
"""Seconds between the start of an attempt and the import for the next one: until then its ranks import."""


COLD, STANDBY = "supervisor", "standby"
"""The folders of a job's supervisors."""


@dataclass
class JobHere:
    """One job on this node."""

    folder: Path
    attempts: dict[int, Attempt] = field(default_factory=dict)
    supervisors: dict[str, SupervisorClient] = field(default_factory=dict)
    """By the name of their folder."""
    awaited: asyncio.Task[None] | None = None
    """Prepares the standby."""
    before: asyncio.Task[None] | None = None
    """Ends the supervisors of an earlier job of the same name, which has the same folder."""
    superseded: bool = False
    """Another agent has its ranks, or some of them."""

    def rank(self, key: str) -> tuple[Attempt, int] | None:
        """The rank that supervisors know by this key."""
        for attempt in self.attempts.values():
            for rank in attempt.ranks:
                if attempt.key(rank) == key:
                    return attempt, rank
        return None

    def rank_ended(self, ended: Ended) -> None:
        if place := self.rank(ended.key):
            place[0].ended(place[1], ended)

    def supervisor_gone(self, link: SupervisorClient, gone: Gone) -> None:
        for attempt in self.attempts.values():
            if attempt.link is link and gone.replaced:
                self.superseded = self.superseded or not attempt.over
                attempt.changed()
            elif attempt.link is link:
                attempt.lost(gone)
        if self.supervisors.get(STANDBY) is link:
            self.awaited = None
        self.supervisors = {name: other for name, other in self.supervisors.items() if other is not link}


@dataclass(eq=False)
class Agent:
    client: Client
    node: Node
    folder: Path
    _: KW_ONLY
    tied: bool
    """Everything it starts ends with it."""
    shared: bool = False
    """It runs the jobs of all operators, not only that of the process that started it."""
    paths: RankPaths = field(default_factory=RankPaths)
    preload: tuple[str, ...] = PRELOAD
    say: Callable[[str], None] = logger.info
    hot: float = Settings.device_temperature_celsius
    jobs: dict[str, JobHere] = field(default_factory=dict)
    spare: Spare | None = None
    """A supervisor that has imported torch and waits for a job."""
    incarnation: str = field(default_factory=new_incarnation)
    departing: bool = False
    _term: int = 0
    _leaving: bool = False
    _news: asyncio.Event = field(default_factory=asyncio.Event)
    _tasks: TaskSet = field(default_factory=TaskSet)
    _endings: dict[str, asyncio.Task[None]] = field(default_factory=dict)
    """For each job that was over: ends its supervisors, or has ended them."""

    def __post_init__(self) -> None:
        self.health = GpuHealth(self.client, self.node, self.incarnation, self.hot)
        self.examining = NodeCheckService(self.client, self.node, self.folder, self.health.gpus.look, self._news.set)

    @property
    def attempts(self) -> list[Attempt]:
        """Of all jobs."""
        return [attempt for job in self.jobs.values() for attempt in job.attempts.values()]

    # ── talking ──

    async def run(self) -> None:
        """Until cancelled. Raises AlreadyUp if another agent has taken over ranks, which continue."""
        await self.client.subscribe(TASK.to(node=self.node.name), cb=self._on_task)
        self._tasks.start(watch(lambda: self.attempts, self._news.set))
        self._tasks.start(self.health.watch())
        await self.examining.listen()
        await self.client.flush()
        while True:
            if job := next((name for name, job in self.jobs.items() if job.superseded), None):
                raise AlreadyUp(
                    f"another agent has taken over the ranks of {job} on {self.node.name}; they continue",
                    hint="this agent gets them back when it is started again",
                )
            self._news.clear()
            with contextlib.suppress(nats.errors.Error):
                await self.client.publish(NODE.to(node=self.node.name), encode(self.beat()))
            await set_within(self._news, BEAT_SECONDS)

    def beat(self) -> NodeBeat:
        states = [link.state for job in self.jobs.values() for link in job.supervisors.values()]
        ready = [state.memory_mb for state in states if not state.preloading and not state.why_cold]
        return NodeBeat(
            incarnation=self.incarnation,
            host=self.node.host,
            cores=self.node.cores,
            memory_mb=self.node.memory_mb,
            devices=self.node.devices,
            loader_budget=self.node.loader_budget,
            pid=os.getpid(),
            tied=self.tied and not self.shared,
            leaving=self.departing,
            standby_mb=int(sum(ready) + (self.spare.memory_mb if self.spare else 0)),
            attempts=tuple(attempt.status() for attempt in self.attempts),
            pressure=read_pressure(),
            readings=self.health.readings(),
            fitness=self.examining.fitness,
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
        job = self.jobs.get(command.job)
        attempt = job.attempts.get(command.attempt) if job is not None else None
        match command:
            case Prepare() | Launch() if self.departing:
                return
            case Prepare() if attempt is None:
                # Held now: the command may be repeated at once.
                self._tasks.start(self._prepare(command, self.hold(command)))
            case Launch() if attempt is None or attempt.launch is None:
                self._launch(command)
            case Halt(grace_seconds=grace, kill=kill_now) if attempt is not None and attempt.ranks:
                attempt.halt(grace, kill_now)
            case Examine(folder=folder):
                self.examining.begin(folder)
            case Inspect() if attempt is not None and attempt.ranks:
                self._tasks.start(self._inspect(attempt, command))
            case Dismiss(last=last) if job is not None and attempt is not None and (attempt.over or not attempt.ranks):
                attempt.forget()
                del job.attempts[command.attempt]
                if last and not job.attempts:
                    self._let_go(command.job)
                self._news.set()

    async def _inspect(self, attempt: Attempt, order: Inspect) -> None:
        inspected = await inspect(attempt, order, self.node.name)
        subject = FACT.to(source=self.node.name)
        with contextlib.suppress(nats.errors.Error, OSError):  # asked again if it does not arrive
            await store_once(self.client, subject, encode(inspected), id=f"{order.incident}-{self.node.name}")

    # ── attempts ──

    def hold(self, command: Prepare | Launch) -> Attempt:
        """The attempt that a command is about."""
        before = self._endings.get(command.job)
        here = self.jobs.setdefault(command.job, JobHere(self.folder / command.job, before=before))
        status = AttemptStatus(job=command.job, attempt=command.attempt)
        folder, logs = here.folder / f"attempt-{command.attempt}", log_folder(here.folder, command)
        return here.attempts.setdefault(command.attempt, Attempt(status, folder, logs, self._news.set))

    async def _prepare(self, command: Prepare, attempt: Attempt) -> None:
        attempt.prepared = await asyncio.to_thread(prepare, command, self.node.host)
        self._news.set()

    def _launch(self, command: Launch) -> None:
        attempt = self.hold(command)
        attempt.expect(command, self.node.name)
        if self.shared:
            self.say(render(phrase("ranks_starting", job=command.job, ranks=spans(attempt.ranks))))
        self._tasks.start(self._start(command, self.jobs[command.job], attempt))

    async def _start(self, command: Launch, job: JobHere, attempt: Attempt) -> None:
        base = passed_on(os.environ, self.say)
        try:
            await attempt.start(await self._supervisor(job, command), base, self.paths)
        except Exception as error:  # noqa: BLE001  the weaver must learn that nothing is started here
            why = str(error) if isinstance(error, TorchLoomError) else f"{type(error).__name__}: {error}"
            attempt.prepared = replace(attempt.prepared, trouble=why[:2000])
            attempt.ranks = {}
            self._news.set()
            return
        cold = any(not rank.warm for rank in attempt.ranks.values())
        if command.task.standby and STANDBY not in job.supervisors and job.awaited is None and cold:
            env = rank_environment(base, command, attempt.places[0], self.paths)
            job.awaited = asyncio.get_running_loop().create_task(self._make_standby(job, command, env))

    async def _supervisor(self, job: JobHere, command: Launch) -> SupervisorClient:
        """The standby if it is ready, else one that starts fresh interpreters."""
        if job.before is not None:
            await asyncio.wait((job.before,))
        standby = job.supervisors.get(STANDBY)
        if standby is not None and command.task.standby and not standby.state.preloading:
            return standby
        link = job.supervisors.get(COLD)
        if link is None and command.task.standby and self.spare is not None:
            link = self.spare.take(job.folder / COLD, job)
        if link is None:
            how = SupervisorOptions(tied=self.tied, cwd=command.task.cwd or None)
            link = await SupervisorClient.start(job.folder / COLD, how, job)
        job.supervisors[COLD] = link
        return link

    async def _make_standby(self, job: JobHere, command: Launch, env: dict[str, str]) -> None:
        """A process that imports torch now, so that ranks of the next attempt need not."""
        task = command.task
        how = SupervisorOptions(
            tied=self.tied,
            preload=tuple(dict.fromkeys((*self.preload, *task.preload))),
            python=task.python or sys.executable,
            env=env,
            cwd=task.cwd or None,
        )
        try:
            await asyncio.sleep(STANDBY_DELAY)
            link = job.supervisors[STANDBY] = await SupervisorClient.start(job.folder / STANDBY, how, job)
            why = (await link.settled()).why_cold
        except (TorchLoomError, OSError) as error:
            why = str(error)
        if why:
            self.say(render(phrase("no_standby", job=command.job, why=why)))
        self._news.set()

    def keep_spare(self) -> None:
        """Have a process ready for the next job from now on, with the environment that its ranks are likely to have."""
        env = passed_on(os.environ, self.say)
        if (len(self.node.devices) or self.node.cores) > 1:
            env = {"OMP_NUM_THREADS": "1"} | env  # as ranks that share a node have
        how = SupervisorOptions(tied=self.tied, preload=self.preload, env=env, cwd="/")
        self.spare = Spare(self.folder.parent, how, self.say)

    def _let_go(self, name: str) -> None:
        """End the supervisors of a job that is over. A new job of the same name waits until they have ended."""
        if self.shared:
            self.say(render(phrase("job_over", job=name)))
        self._endings[name] = asyncio.get_running_loop().create_task(self._end(self.jobs.pop(name)))

    async def _end(self, job: JobHere) -> None:
        """End its supervisors and remove their folders: a spare supervisor is moved to the same place."""
        if job.before is not None:
            await asyncio.wait((job.before,))
        if job.awaited is not None:
            await end_all([job.awaited])
        for link in job.supervisors.values():
            await link.dismiss()
        for name in (COLD, STANDBY):
            shutil.rmtree(job.folder / name, ignore_errors=True)

    # ── leaving ──

    async def depart(self) -> None:
        """End all ranks in order, and give the weaver a second to acknowledge their ends."""
        self.departing = True
        attempts = self.attempts
        for attempt in attempts:
            attempt.halt(attempt.launch.task.grace if attempt.launch is not None else 0.0)
        self._news.set()
        halting = [attempt.halting for attempt in attempts if attempt.halting is not None]
        await asyncio.gather(*halting, return_exceptions=True)  # each ends with the grace
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FAREWELL_SECONDS):
                while self.attempts:
                    await asyncio.sleep(0.02)

    async def say_goodbye(self) -> None:
        """Report that nothing runs here, and that nothing may be started here."""
        self.departing = True
        with contextlib.suppress(nats.errors.Error, OSError):
            await self.client.publish(NODE.to(node=self.node.name), encode(self.beat()))
            await self.client.flush(1)

    async def close(self) -> None:
        """Let go of the supervisors, or end everything that was started here if it is tied to this agent."""
        self._leaving = True
        await self.examining.close()
        if self.spare is not None:
            await self.spare.close()
        # Otherwise they would start processes that nobody ends.
        await end_all([*self._tasks, *(job.awaited for job in self.jobs.values() if job.awaited is not None)])
        await asyncio.gather(*self._endings.values(), return_exceptions=True)
        for job in self.jobs.values():
            if self.tied:
                await self._end(job)
            for link in job.supervisors.values():
                link.close()
        for attempt in self.attempts if self.tied else ():
            shutil.rmtree(attempt.folder, ignore_errors=True)
