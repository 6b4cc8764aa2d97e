"""Submit a job and stay with it: show what it prints and how far it is, tell what happens to it, end as it ends.

Where its ranks run is a matter of `Hands`: those of this process, or agents elsewhere.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from torchloom.agent.statusline import StatusLine, how_far
from torchloom.agent.telling import INTERRUPTED, OVER, exit_code, summary
from torchloom.agent.unknown import Unknown, script_of
from torchloom.bus.asking import Asking
from torchloom.errors import TorchLoomError
from torchloom.messages import Cancel, IncidentView, RunView, Submit, Task
from torchloom.settings import Settings
from torchloom.subjects import Role

POLL_SECONDS = 0.05
CALM_SECONDS = 0.2
"""Between two questions while it runs: the cores are for the ranks."""
LOOK_SECONDS = 1.0
"""Between two looks at how far it is."""
NOBODY_SECONDS = 5.0
"""Without an answer, after which a job that was interrupted is left to itself if nothing of it runs here."""


@dataclass(frozen=True)
class Wish:
    job: str
    task: Task
    operator: str = ""
    colour: bool = False
    say: Callable[[str], None] = lambda text: print(f"loom: {text}", file=sys.stderr, flush=True)
    line: StatusLine = field(default_factory=StatusLine)
    """Hidden by whoever prints."""


class Hands(Protocol):
    """What can be done about the ranks from here."""

    async def show(self, run: RunView | None, told: int) -> None:
        """Print what they have printed since, of attempts whose beginning was told."""

    async def finish(self, run: RunView | None) -> None:
        """Print what is left."""

    def rejected(self) -> dict[str, str]:
        """Checkpoints that were passed over, and why, as far as it is known here."""

    def halt(self) -> None:
        """End them; nobody else does."""

    def kill(self) -> None:
        """At once."""

    def over(self) -> bool:
        """Whether none of them is left here."""


@dataclass
class Following:
    settings: Settings
    wish: Wish
    hands: Hands
    presses: int = 0
    told: int = 0
    """Attempts whose beginning was told."""
    stopped: int = 0
    waiting: str = ""
    hinted: bool = False
    unknown: Unknown = field(init=False)
    _looked: float = 0.0
    _phase: str = ""

    def __post_init__(self) -> None:
        self.line = self.wish.line
        self.unknown = Unknown(self.wish.job, script_of(self.wish.task), self.say)

    def say(self, text: str) -> None:
        self.line.hide()
        self.wish.say(text)

    async def follow(self) -> int:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._press)
        async with Asking(self.settings, Role.OPERATOR, timeout=2.0, patience=3.0) as weaver:
            await self._submit(weaver)
            run = await self._until_over(weaver)
            incidents = await self._incidents(weaver) if run is not None and len(run.notes) > 1 else ()
            self.line.hide()
            await self.hands.finish(run)
        if run is None or run.phase not in OVER:
            return INTERRUPTED
        self.say(summary(run, time.time(), incidents))
        return exit_code(run)

    async def _until_over(self, weaver: Asking) -> RunView | None:
        cancelling: asyncio.Task[None] | None = None
        run: RunView | None = None
        heard = time.monotonic()
        try:
            while run is None or run.phase not in OVER:
                with contextlib.suppress(TorchLoomError):  # the weaver is being started anew
                    found = (await weaver.runs(self.wish.job)).runs
                    run = found[0] if found else run
                    heard = time.monotonic()
                    if run is not None:
                        await self._look(weaver, run)
                await self.hands.show(run, self.told)
                if run is not None:
                    self._tell(run)
                    await self.hands.show(run, self.told)
                if self.presses and cancelling is None:
                    cancelling = asyncio.create_task(self._cancel(weaver))
                if self.presses > 1:
                    self.hands.kill()
                    break
                if self.presses and time.monotonic() - heard > NOBODY_SECONDS and self.hands.over():
                    break  # nobody is left to say that it is cancelled
                self.line.show()
                calm = run is not None and run.phase == "running"
                await asyncio.sleep(CALM_SECONDS if calm else POLL_SECONDS)
        finally:
            if cancelling is not None:
                cancelling.cancel()
        return run

    async def _incidents(self, weaver: Asking) -> tuple[IncidentView, ...]:
        """What went wrong, if there is still somebody to tell."""
        with contextlib.suppress(TorchLoomError):
            return (await weaver.fabric(self.wish.job, most=0)).incidents
        return ()

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

    async def _look(self, weaver: Asking, run: RunView) -> None:
        await self.unknown.look(weaver, run)
        due = time.monotonic() - self._looked >= LOOK_SECONDS or run.phase != self._phase
        if self.line.wanted and due:
            self._looked, self._phase = time.monotonic(), run.phase
            view = await weaver.fabric(self.wish.job, most=0)
            self.line.text = how_far(run, view.jobs[0] if view.jobs else None)

    # ── being interrupted ──

    def _press(self) -> None:
        self.presses += 1
        if self.presses == 1:
            self.say("ending the job; once more to kill it")

    async def _cancel(self, weaver: Asking) -> None:
        ask = Cancel(request=secrets.token_hex(16), job=self.wish.job, why="interrupted", operator=self.wish.operator)
        try:
            await weaver.ask_until(ask, 2.0)
        except TorchLoomError:  # nobody decides: then we do
            self.hands.halt()

    # ── telling ──

    def _tell(self, run: RunView) -> None:
        if run.waiting and run.waiting != self.waiting:
            self.say(f"waiting for {run.waiting}")
        self.waiting = run.waiting
        for note in run.notes:  # in the order of what happened, however much of it is new
            last = note is run.notes[-1]
            if note.number > self.told and (not last or run.phase in {"starting", "running", "stopping", *OVER}):
                self.told = note.number
                if last:
                    self._tell_beginning(run)
            if note.number > self.stopped and note.stopping is not None:
                self.stopped = note.number
                self.say(note.reason)

    def _tell_beginning(self, run: RunView) -> None:
        if run.resume:
            at = f" (step {run.resume_step})" if run.resume_step is not None else ""
            self.say(f"attempt {run.attempt} goes on from {run.resume}{at}")
            if not self.wish.task.resume_arg and not self.hinted:
                self.hinted = True
                self.say("the script finds it in TORCHLOOM_RESUME_FROM; --resume-arg passes it as an argument")
            for name, why in self.hands.rejected().items():
                self.say(f"{name} is passed over: {why}")
        elif run.attempt > 1:
            where = self.wish.task.checkpoint_dir
            self.say(f"attempt {run.attempt} begins" + (f" anew: no checkpoint in {where}" if where else ""))
