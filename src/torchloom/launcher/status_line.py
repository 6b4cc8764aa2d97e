"""The last line of a terminal: how far a job is. It makes room for what is printed, and comes back below it."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field

from torchloom.protocol.views import JobView, RunView


@dataclass
class StatusLine:
    wanted: bool = field(default_factory=lambda: sys.stderr.isatty() and sys.stdout.isatty())
    """There is someone to see it, and what is printed goes to the same place."""
    text: str = ""
    _shown: str = ""

    def show(self) -> None:
        if self.wanted and self.text and self.text != self._shown:
            width = shutil.get_terminal_size().columns - 1
            sys.stderr.write(f"\r\x1b[K\x1b[2m{self.text[:width]}\x1b[0m")
            sys.stderr.flush()
            self._shown = self.text

    def hide(self) -> None:
        if self._shown:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()
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
    restarts = sum(max(0, len(run.notes) - 1) for run in runs)
    if restarts:
        parts.append(f"{restarts} restart{'s' if restarts != 1 else ''}")
    return f"{name}: {', '.join(parts)}"
