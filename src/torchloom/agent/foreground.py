"""`loom run`: submit a job, run it on this node with an agent of our own, show what it prints, end as it ends.

Launcher and agent are one process, and everything it starts dies with it. Where no control plane answers it brings its
own, in a folder that is removed afterwards.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path

from torchloom.agent.agent import Agent
from torchloom.agent.environment import Ways
from torchloom.agent.node import Node, this_node
from torchloom.agent.output import Output
from torchloom.bus.asking import Asking
from torchloom.bus.client import connect, find
from torchloom.bus.folder import Folder
from torchloom.bus.server import die_with_parent, stop_process
from torchloom.errors import BadState, TorchLoomError, Unreachable
from torchloom.messages import Cancel, RunsView, RunView, Submit, Task
from torchloom.settings import Settings
from torchloom.subjects import Role

POLL_SECONDS = 0.05
UP_SECONDS = 20.0
OVER = frozenset({"done", "failed", "cancelled"})
INTERRUPTED = 130


@dataclass(frozen=True)
class Wish:
    job: str
    task: Task
    operator: str = ""
    colour: bool = False
    say: Callable[[str], None] = lambda text: print(f"loom: {text}", file=sys.stderr, flush=True)


async def run(settings: Settings, wish: Wish) -> int:
    """Until the job is over; its exit code."""
    async with contextlib.AsyncExitStack() as stack:
        asked = settings
        settings = await stack.enter_async_context(plane(settings))
        if settings is not asked:
            wish.say(f"a control plane of its own: `loom --state {settings.state} status` looks at it")
        node = this_node(name=wish.task.node or "")
        agent = await stack.enter_async_context(agent_of(settings, node, wish))
        return await _Foreground(settings, wish, agent).follow()


@contextlib.asynccontextmanager
async def plane(settings: Settings) -> AsyncIterator[Settings]:
    """The control plane that is there, or one of our own for as long as this lasts."""
    if await _answers(settings):
        yield settings
        return
    folder = Path(tempfile.mkdtemp(prefix="torchloom-run-"))
    own = Settings.from_env({"TORCHLOOM_STATE": str(folder)})
    command = [sys.executable, "-P", "-m", "torchloom.cli.main", "--state", str(folder), "up", "--port", "0"]
    clean = {name: value for name, value in os.environ.items() if name not in {"TORCHLOOM_ADDR", "TORCHLOOM_CREDS"}}
    with (folder / "up.log").open("wb") as log:
        process = subprocess.Popen(  # noqa: ASYNC220  in this thread: it dies with it
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=clean,
            start_new_session=True, preexec_fn=die_with_parent(),  # noqa: PLW1509  no threads yet
        )  # fmt: skip
    try:
        end = time.monotonic() + UP_SECONDS
        while not await _answers(own):
            if process.poll() is not None or time.monotonic() > end:
                last = (folder / "up.log").read_text(errors="replace").strip().splitlines()
                raise BadState(f"no control plane came up: {last[-1] if last else 'it said nothing'}")
            await asyncio.sleep(0.02)
        yield own
    finally:
        await asyncio.to_thread(stop_process, process, 5.0)
        shutil.rmtree(folder, ignore_errors=True)


async def _answers(settings: Settings) -> bool:
    try:
        async with Asking(settings, Role.OPERATOR, timeout=1.0, connect_timeout=1.0) as weaver:
            await weaver.runs("-")
    except (Unreachable, BadState):
        return False
    return True


@contextlib.asynccontextmanager
async def agent_of(settings: Settings, node: Node, wish: Wish) -> AsyncIterator[Agent]:
    address = find(settings, Role.AGENT)
    client = await connect(address, name=f"agent {node.name}", keep_trying=True)
    folder = Path(tempfile.mkdtemp(prefix="torchloom-agent-"))
    ways = Ways("", addr=settings.addr, state=str(settings.state_folder))
    agent = Agent(client, node, folder, tied=True, ways=ways, say=wish.say)
    running = asyncio.create_task(agent.run())
    try:
        yield agent
    finally:
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running
        await agent.close(kill=True)
        with contextlib.suppress(Exception):
            await asyncio.wait_for(client.close(), 1)
        shutil.rmtree(folder, ignore_errors=True)


@dataclass
class _Foreground:
    settings: Settings
    wish: Wish
    agent: Agent
    presses: int = 0
    told: int = 0
    """Attempts whose beginning was told."""
    stopped: int = 0
    output: Output = field(init=False)

    def __post_init__(self) -> None:
        self.output = Output(self.wish.colour)

    async def follow(self) -> int:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._press)
        async with Asking(self.settings, Role.OPERATOR, timeout=2.0, patience=3.0) as weaver:
            await self._submit(weaver)
            cancelling: asyncio.Task[None] | None = None
            run: RunView | None = None
            heard = time.monotonic()
            while run is None or run.phase not in OVER:
                self._show()
                with contextlib.suppress(TorchLoomError):  # the weaver is being started anew
                    run = _mine(await weaver.runs(self.wish.job)) or run
                    heard = time.monotonic()
                if run is not None:
                    self._tell(run)
                if self.presses and cancelling is None:
                    cancelling = asyncio.create_task(self._cancel(weaver))
                if self.presses > 1:
                    self._kill()
                    break
                if self.presses and time.monotonic() - heard > 5 and self._all_over():
                    break  # nobody is left to say that it is cancelled
                await asyncio.sleep(POLL_SECONDS)
            if cancelling is not None:
                cancelling.cancel()
        self._show()
        self.output.finish()
        return self._end(run)

    async def _submit(self, weaver: Asking) -> None:
        task = self.wish.task
        ask = Submit(request=secrets.token_hex(16), job=self.wish.job, task=task, operator=self.wish.operator)
        for attempt in range(100):  # until the weaver has heard of our agent
            try:
                await weaver.ask_until(ask, 10.0)
            except TorchLoomError as error:
                if "there is no agent" not in error.message or attempt == 99:
                    raise
                await asyncio.sleep(0.02)
            else:
                return

    def _press(self) -> None:
        self.presses += 1
        if self.presses == 1:
            self.wish.say("ending the job; once more to kill it")

    async def _cancel(self, weaver: Asking) -> None:
        ask = Cancel(request=secrets.token_hex(16), job=self.wish.job, why="interrupted", operator=self.wish.operator)
        try:
            await weaver.ask_until(ask, 2.0)
        except TorchLoomError:  # nobody decides: then we do
            for job in self.agent.jobs.values():
                for attempt in job.attempts.values():
                    attempt.halt(self.wish.task.grace_seconds)

    def _all_over(self) -> bool:
        return all(attempt.over for job in self.agent.jobs.values() for attempt in job.attempts.values())

    def _kill(self) -> None:
        for job in self.agent.jobs.values():
            for attempt in job.attempts.values():
                attempt.kill()

    # ── telling ──

    def _show(self) -> None:
        for job in self.agent.jobs.values():
            for attempt in job.attempts.values():
                self.output.follow(attempt.logs, sorted(attempt.ranks))
        self.output.show()

    def _tell(self, run: RunView) -> None:
        notes = run.notes
        if notes and len(notes) > self.told and run.phase in {"starting", "running", "stopping", *OVER}:
            self.told = len(notes)
            if run.resume:
                at = f" (step {run.resume_step})" if run.resume_step is not None else ""
                self.wish.say(f"attempt {run.attempt} goes on from {run.resume}{at}")
            elif run.attempt > 1:
                where = self.wish.task.checkpoint_dir
                self.wish.say(f"attempt {run.attempt} begins anew" + (f": no checkpoint in {where}" if where else ""))
        ended = [note for note in notes if note.stopping is not None]
        if len(ended) > self.stopped:
            self.stopped = len(ended)
            self.wish.say(ended[-1].reason)

    def _end(self, run: RunView | None) -> int:
        if run is None or run.phase not in OVER:
            return INTERRUPTED
        self.wish.say(summary(run, time.time()))
        if run.phase == "done":
            return 0
        if run.phase == "cancelled":
            return INTERRUPTED
        return run.notes[-1].code if run.notes and run.notes[-1].code else 1


def _mine(view: RunsView) -> RunView | None:
    return view.runs[0] if view.runs else None


def summary(run: RunView, now: float) -> str:
    """What happened, in one line: how it ended, how long it took, how often it was started again and what that cost."""
    parts = [f"{run.job} is {run.phase}" + (f": {run.reason}" if run.reason and run.phase != "done" else "")]
    took = (run.notes[-1].ended or now) - run.submitted if run.notes else 0.0
    parts.append(f"{took:.1f} s")
    restarts = len(run.notes) - 1
    if restarts > 0:
        lost = 0.0
        for before, after in zip(run.notes, run.notes[1:], strict=False):
            if before.stopping is not None:
                lost += (after.running or after.began) - before.stopping
        parts.append(f"{restarts} restart{'s' if restarts != 1 else ''}, {lost:.1f} s until all ranks ran again")
    return ", ".join(parts)


def log_folder(settings: Settings, job: str) -> Path:
    """Where the output of a run is kept."""
    return Folder(settings.state_folder).path / "runs" / job / time.strftime("%Y%m%d-%H%M%S")
