"""What is told of one run while it goes on: what it waits for, each attempt as it begins, and why it was ended."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torchloom.protocol.views import RunView
from torchloom.views.job_runs import OVER


@dataclass
class RunProgress:
    say: Callable[[str], None]
    rejected: Callable[[], dict[str, str]] = dict
    """Checkpoints that were passed over, and why."""
    told: int = 0
    """Attempts whose beginning was told."""
    stopped: int = 0
    waiting: str = ""
    hinted: bool = False

    def go_on(self, run: RunView) -> None:
        if run.waiting and run.waiting != self.waiting:
            self.say(f"waiting for {run.waiting}")
        self.waiting = run.waiting
        for note in run.notes:  # in the order of what happened, however much of it is new
            last = note is run.notes[-1]
            if note.number > self.told and (not last or run.phase in {"starting", "running", "stopping", *OVER}):
                self.told = note.number
                if last:
                    self._beginning(run)
            if note.number > self.stopped and note.stopping is not None:
                self.stopped = note.number
                self.say(str(note.reason))  # the weaver has rendered it

    def _beginning(self, run: RunView) -> None:
        task = run.task
        if run.resume:
            at = f" (step {run.resume_step})" if run.resume_step is not None else ""
            self.say(f"attempt {run.attempt} goes on from {run.resume}{at}")
            if not task.resume_arg and not self.hinted:
                self.hinted = True
                self.say("the script finds it in TORCHLOOM_RESUME_FROM; --resume-arg passes it as an argument")
            for name, why in self.rejected().items():
                self.say(f"{name} is passed over: {why}")
        elif run.attempt > 1 and run.notes[-1].heals:
            self.say(f"attempt {run.attempt} begins; it heals from the others")
        elif run.attempt > 1:
            where = task.checkpoint_dir
            self.say(f"attempt {run.attempt} begins" + (f" anew: no checkpoint in {where}" if where else ""))
