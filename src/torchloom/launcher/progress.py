"""What `loom run` says about a run while it lasts: its attempts, what is unknown of it, and a status line."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torchloom.protocol.job_spec import Task
from torchloom.protocol.views import JobView, RankView, RunView
from torchloom.views.job_runs import OVER, awaited


@dataclass
class RunProgress:
    say: Callable[[str], None]
    begun: int = 0
    """Number of attempts whose beginning was reported."""
    stopped: int = 0
    waiting: str = ""
    hinted: bool = False

    def go_on(self, run: RunView) -> None:
        if run.waiting and awaited(run) != self.waiting:
            self.say(f"waiting for {run.waiting}")
        self.waiting = awaited(run)
        for note in run.notes:  # in the order of what happened, however much of it is new
            last = note is run.notes[-1]
            if note.number > self.begun and (not last or run.phase in {"starting", "running", "stopping", *OVER}):
                self.begun = note.number
                if last:
                    self._beginning(run)
            if note.number > self.stopped and note.stopping is not None:
                self.stopped = note.number
                self.say(str(note.reason))  # the weaver has rendered it

    def _beginning(self, run: RunView) -> None:
        task = run.task
        if run.resume:
            at = f" (step {run.resume_step})" if run.resume_step is not None else ""
            self.say(f"attempt {run.attempt} resumes from {run.resume}{at}")
            if not task.resume_arg and not self.hinted:
                self.hinted = True
                self.say("the script finds it in TORCHLOOM_RESUME_FROM; --resume-arg passes it as an argument")
            for name, why in run.rejected.items():
                self.say(f"{name} is passed over: {why}")
        elif run.attempt > 1 and run.notes[-1].heals:
            self.say(f"attempt {run.attempt} begins; it heals from the others")
        elif run.attempt > 1:
            where = task.checkpoint_dir
            again = f"starts from the beginning: no checkpoint in {where}" if where else "begins"
            self.say(f"attempt {run.attempt} {again}")


PATIENCE = 30.0
"""Seconds that all ranks run without a message before the user learns that their steps are not known."""
COUNTED = (
    "does not call torchloom.attach(): its steps are counted at optimizer.step(); "
    "its loss, samples and knobs are not known"
)
NOTHING = f"has said nothing yet, after {PATIENCE:g} s: its steps are not known"
"""It may still be importing, or read its data; only what it says when it begins to train tells more."""


@dataclass
class UnattachedHint:
    script: str
    say: Callable[[str], None]
    over: bool = False
    """There is nothing more to report."""
    messages: set[str] = field(default_factory=set)
    _running: float | None = None
    """Since when all ranks run."""

    def look(self, run: RunView, ranks: Sequence[RankView]) -> None:
        """Now and then."""
        if run.phase != "running":
            self._running = None
        elif not self.over:
            self._running = self._running or time.monotonic()
            self._judge(ranks, time.monotonic() - self._running)

    def look_back(self, ranks: Sequence[RankView]) -> None:
        """When the job is over. All its ranks may have begun and ended between two looks."""
        if not self.over and ranks and all(rank.counted for rank in ranks):
            self.over = True
            self.say(f"{self.script} {COUNTED}")

    def _judge(self, ranks: Sequence[RankView], seconds: float) -> None:
        what, self.over = unknown(ranks, seconds)
        if what and what not in self.messages:
            self.messages.add(what)
            self.say(f"{self.script} {what}")


def unknown(ranks: Sequence[RankView], seconds: float) -> tuple[str, bool]:
    """What is not known about ranks that have run for `seconds`, and whether that is final."""
    live = [rank for rank in ranks if rank.presence == "live"]
    if any(not rank.counted for rank in live):
        return "", True
    if live:
        return COUNTED, True
    return (NOTHING if seconds >= PATIENCE else ""), False


def script_of(task: Task) -> str:
    """What a person calls it."""
    return task.argv[1] if task.argv[0] == "-m" else task.argv[0]


@dataclass
class StatusLine:
    wanted: bool = field(default_factory=lambda: sys.stderr.isatty() and sys.stdout.isatty())
    """There is someone to see it, and what is printed goes to the same place."""
    text: str = ""
    _shown: str = ""

    def show(self) -> None:
        if self.wanted and self.text and self.text != self._shown:
            width = shutil.get_terminal_size().columns - 1
            print(f"\r\x1b[K\x1b[2m{self.text[:width]}\x1b[0m", end="", file=sys.stderr, flush=True)
            self._shown = self.text

    def hide(self) -> None:
        if self._shown:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
            self._shown = ""


def how_far(name: str, runs: Sequence[RunView], job: JobView | None) -> str:
    """`mnist: running, 2/2 ranks, step 1,500, loss 0.0123, 5,230 samples/s, 1 restart`."""
    running = sum(run.phase == "running" for run in runs)
    parts = [runs[0].phase if len(runs) == 1 else f"{running}/{len(runs)} replicas running"]
    if job is not None and job.ranks:
        parts.append(f"{job.live}/{job.ranks} ranks")
        if job.step is not None:
            parts.append(f"step {job.step:,}")
        if job.loss is not None:
            parts.append(f"loss {job.loss:.4g}")
        if job.samples_per_second is not None:
            parts.append(f"{job.samples_per_second:,.0f} samples/s")
    restarts = sum(note.next_action != "release" for run in runs for note in run.notes[:-1])
    if restarts:
        parts.append(f"{restarts} restart{'s' if restarts != 1 else ''}")
    return f"{name}: {', '.join(parts)}"
