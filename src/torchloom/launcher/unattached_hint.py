"""What `loom run` does not know of a script that never attaches, and says once."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torchloom.bus.weaver_client import WeaverClient
from torchloom.protocol.job import Task
from torchloom.protocol.views import RankView, RunView

LOOK_SECONDS = 1.0
PATIENCE = 30.0
"""Seconds that all ranks run without a word before it is said that nothing is known of their steps."""
COUNTED = (
    "does not call torchloom.attach(): its steps are counted at optimizer.step(); "
    "its loss, samples and knobs are not known"
)
NOTHING = f"has said nothing yet, after {PATIENCE:g} s: its steps are not known"
"""It may still be importing, or read its data; only what it says when it begins to train tells more."""


@dataclass
class UnattachedHint:
    job: str
    script: str
    say: Callable[[str], None]
    over: bool = False
    """All that will ever be said is said."""
    said: set[str] = field(default_factory=set)
    _looked: float = 0.0
    _running: float | None = None
    """Since when all ranks run."""

    async def look(self, weaver: WeaverClient, run: RunView) -> None:
        """Now and then, while the ranks run."""
        now = time.monotonic()
        if run.phase != "running":
            self._running = None
        elif not self.over and now - self._looked >= LOOK_SECONDS:
            self._looked = now
            self._running = now if self._running is None else self._running
            self._judge((await weaver.cluster(self.job)).ranks, now - self._running)

    def _judge(self, ranks: Sequence[RankView], seconds: float) -> None:
        what, self.over = unknown(ranks, seconds)
        if what and what not in self.said:
            self.said.add(what)
            self.say(f"{self.script} {what}")


def unknown(ranks: Sequence[RankView], seconds: float) -> tuple[str, bool]:
    """What is not known of ranks that have run for so long, and whether that will stay so."""
    live = [rank for rank in ranks if rank.presence == "live"]
    if any(not rank.counted for rank in live):
        return "", True
    if live:
        return COUNTED, True
    return (NOTHING if seconds >= PATIENCE else ""), False


def script_of(task: Task) -> str:
    """What a person calls it."""
    return task.argv[1] if task.argv[0] == "-m" else task.argv[0]
