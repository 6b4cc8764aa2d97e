"""Submit a job and follow it: show its output and its progress, report what happens, and exit with its exit code.

Its ranks are run by an agent in this process, or by the agents of other nodes, where the weaver alone ends them.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torchloom.agent.agent import Agent
from torchloom.agent.attempt import Attempt
from torchloom.bus.tasks import on_stop_signal
from torchloom.bus.weaver_client import WeaverClient
from torchloom.errors import Refused, TorchLoomError
from torchloom.launcher.output import FileReader, Output, OutputReader, RemoteReader
from torchloom.launcher.progress import RunProgress, StatusLine, UnattachedHint, how_far, script_of
from torchloom.protocol.job_spec import Task
from torchloom.protocol.operator import Cancel, Submit
from torchloom.protocol.subjects import Role
from torchloom.protocol.views import IncidentView, RankView, RunView
from torchloom.settings import Settings
from torchloom.views.job_runs import INTERRUPTED, are_over, group_code, label, replicas, summarize_job

POLL_SECONDS = 0.05
CALM_SECONDS = 0.2
"""Between two questions while it runs: the cores are for the ranks."""
LOOK_SECONDS = 1.0
"""Between two looks at how far it is."""
NOBODY_SECONDS = 5.0
"""Without an answer, after which a job that was interrupted is left to itself if nothing of it runs here."""


@dataclass(frozen=True)
class LaunchRequest:
    job: str
    task: Task
    operator: str = ""
    colour: bool = False
    say: Callable[[str], None] = lambda text: print(f"loom: {text}", file=sys.stderr, flush=True)
    line: StatusLine = field(default_factory=StatusLine)
    """Hidden before anything is printed."""


@dataclass
class RunFollower:
    """Submits a job and follows it until it is over, wherever its ranks run."""

    settings: Settings
    request: LaunchRequest
    agent: Agent | None = None
    """That runs the ranks, if it is in this process."""
    presses: int = 0
    progress: dict[str, RunProgress] = field(default_factory=dict)
    hint: UnattachedHint = field(init=False)
    reader: OutputReader = field(init=False)
    _looked: float = 0.0
    _shown: float = 0.0
    _phase: str = ""

    def __post_init__(self) -> None:
        self.line = self.request.line
        self.hint = UnattachedHint(script_of(self.request.task), self.say)

    @property
    def _attempts(self) -> list[Attempt]:
        """Those of which ranks run here."""
        return [] if self.agent is None else self.agent.attempts

    def say(self, text: str) -> None:
        self.line.hide()
        self.request.say(text)

    async def follow(self) -> int:
        on_stop_signal(self._press)
        async with WeaverClient(self.settings, Role.OPERATOR, timeout=2.0, patience=3.0) as weaver:
            output = Output(self.request.colour, before=self.line.hide)
            self.reader = RemoteReader(weaver.client, output) if self.agent is None else FileReader(output)
            await self._submit(weaver)
            runs = await self._until_over(weaver)
            incidents, ranks = await self._look_back(weaver, runs)
            self.line.hide()
            for run in replicas(runs):
                await self.reader.show_attempts(run, run.attempt, over=True)
            self.reader.output.finish()
            self.hint.look_back(ranks)
        if not are_over(runs):
            return INTERRUPTED
        self.say(summarize_job(self.request.job, runs, time.time(), incidents))
        return group_code(runs)

    async def _until_over(self, weaver: WeaverClient) -> Sequence[RunView]:
        cancelling: asyncio.Task[None] | None = None
        runs: Sequence[RunView] = ()
        heard = time.monotonic()
        try:
            while not are_over(runs):
                with contextlib.suppress(TorchLoomError):  # the weaver is being restarted
                    runs = (await weaver.runs(self.request.job)).runs or runs
                    heard = time.monotonic()
                    if runs:
                        await self._look(weaver, runs)
                await self._show_output(runs)
                for run in runs:
                    self._progress_of(run).go_on(run)
                if self.presses and cancelling is None:
                    cancelling = asyncio.create_task(self._cancel(weaver))
                if self.presses > 1:
                    for attempt in self._attempts:
                        attempt.kill()
                    break
                here = any(not attempt.over for attempt in self._attempts)
                if self.presses and not here and time.monotonic() - heard > NOBODY_SECONDS:
                    break  # nobody is left to say that it is cancelled
                self.line.show()
                calm = bool(runs) and all(run.phase == "running" for run in runs)
                await asyncio.sleep(CALM_SECONDS if calm else POLL_SECONDS)
        finally:
            if cancelling is not None:
                cancelling.cancel()
        return runs

    def _progress_of(self, run: RunView) -> RunProgress:
        name = label(run)
        say = (lambda text: self.say(f"{name}: {text}")) if name else self.say
        return self.progress.setdefault(run.job, RunProgress(say))

    async def _show_output(self, runs: Sequence[RunView]) -> None:
        """Of attempts whose beginning was reported."""
        if time.monotonic() - self._shown >= self.reader.pause:
            self._shown = time.monotonic()
            for run in replicas(runs):
                await self.reader.show_attempts(run, self._progress_of(run).begun)

    async def _look_back(
        self, weaver: WeaverClient, runs: Sequence[RunView]
    ) -> tuple[Sequence[IncidentView], Sequence[RankView]]:
        """What went wrong, and the ranks if nobody has seen them live; nothing if the weaver has gone."""
        if self.hint.over and all(len(run.notes) <= 1 for run in runs):
            return (), ()
        with contextlib.suppress(TorchLoomError):
            view = await weaver.cluster(self.request.job, most=0 if self.hint.over else None)
            return view.incidents, view.ranks
        return (), ()

    async def _submit(self, weaver: WeaverClient) -> None:
        task = self.request.task
        ask = Submit(request=secrets.token_hex(16), job=self.request.job, task=task, operator=self.request.operator)
        for attempt in range(100):  # until the weaver has a beat of our agent
            try:
                await weaver.ask(ask, 10.0)
            except Refused as error:
                if error.code != "no_agent_on_node" or attempt == 99:
                    raise
                await asyncio.sleep(0.02)
            else:
                return

    async def _look(self, weaver: WeaverClient, runs: Sequence[RunView]) -> None:
        run = replicas(runs)[0]
        if time.monotonic() - self._looked < LOOK_SECONDS and run.phase == self._phase:
            return
        self._looked, self._phase = time.monotonic(), run.phase
        ranks: Sequence[RankView] = ()
        wants_ranks = run.phase == "running" and not self.hint.over
        if self.line.wanted or wants_ranks:
            view = await weaver.cluster(self.request.job, most=None if wants_ranks else 0)
            job = view.jobs[0] if view.jobs else None
            self.line.text, ranks = how_far(self.request.job, replicas(runs), job), view.ranks
        self.hint.look(run, ranks)

    # ── being interrupted ──

    def _press(self) -> None:
        self.presses += 1
        if self.presses == 1:
            self.say("ending the job; once more to kill it")

    async def _cancel(self, weaver: WeaverClient) -> None:
        ask = Cancel(
            request=secrets.token_hex(16), job=self.request.job, why="interrupted", operator=self.request.operator
        )
        try:
            await weaver.ask(ask, 2.0)
        except TorchLoomError:  # nobody decides: then we do
            for attempt in self._attempts:
                attempt.halt(self.request.task.grace)
