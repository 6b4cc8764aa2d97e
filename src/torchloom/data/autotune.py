"""The smallest number of loader processes that keeps training fed.

With `load`, the seconds that one process needs for a batch, and `use`, the seconds for which training uses one, n
processes deliver a batch every load / n seconds. Training is fed if that is below `use`:

    n = load / use, with a margin, rounded up

Both are measured while training runs, in windows of batches. Processes beyond the free cores make `load` longer, so the
number is approached in steps, and a step that did not shorten the waiting is taken back: then the disk, the memory or
the cores are the limit, and more processes do not help.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from torchloom.data.stage_times import LoadingMeter, Window, clock
from torchloom.protocol.data_loading import Loading

MARGIN = 1.15
FED = 0.05
"""Training is fed if it waits for at most this share of the time."""
HELPS = 0.8
"""More processes help if the waiting is at most this share of what it was."""
LEAST_BATCHES = 32
LEAST_SECONDS = 2.0
"""A window has both."""
CALM = 3
"""Windows in a row that must agree before there are fewer processes."""


@dataclass(frozen=True, slots=True)
class Tuning:
    """A choice, with the measurements that led to it."""

    loaders: int
    reason: Literal["enough", "starved", "surplus", "limit", "no_help"]
    """Training is fed; it waited; fewer are enough; more are not allowed; more did not help."""
    load: float
    """Seconds that one process needs for a batch."""
    use: float
    """Seconds for which training uses a batch."""
    wait: float
    """Seconds that training waits for a batch."""

    def __str__(self) -> str:
        because = {
            "enough": "training is fed",
            "starved": "training waited for data",
            "surplus": "fewer are enough",
            "limit": "training still waits, and this is the most that is allowed",
            "no_help": "training still waits, and more did not help",
        }
        times = f"a batch takes {1000 * self.load:.3g} ms to load, and training uses it for {1000 * self.use:.3g} ms"
        return f"{self.loaders} loaders: {because[self.reason]}; {times} and waits {1000 * self.wait:.3g} ms"


class Chooser:
    """Chooses a number after each window. Pure."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._calm = 0
        self._before: tuple[int, float] | None = None
        """Before the last growth: the number, and the waiting with it."""
        self._ceiling: int | None = None
        """More than this did not help."""

    def choose(self, seen: Loading) -> Tuning:
        load = seen.read + seen.decode + seen.collate + seen.transfer
        count, reason = self._choose(seen, load)
        return Tuning(count, reason, load, seen.use, seen.wait)

    def _choose(
        self, seen: Loading, load: float
    ) -> tuple[int, Literal["enough", "starved", "surplus", "limit", "no_help"]]:
        now, most = seen.loaders, self._most
        needed = max(1, math.ceil(MARGIN * load / seen.use)) if seen.use > 0 else most
        before, self._before = self._before, None
        if seen.wait <= FED * (seen.wait + seen.use):
            self._calm = self._calm + 1 if 0 < needed < now else 0
            if self._calm < CALM:
                return now, "enough"
            self._calm = 0
            return needed, "surplus"
        self._calm = 0
        if before is not None and now > before[0] and seen.wait > HELPS * before[1]:
            self._ceiling = before[0]
            return before[0], "no_help"
        ceiling = min(most, self._ceiling if self._ceiling is not None else most)
        if now >= ceiling:
            return now, "no_help" if ceiling < most else "limit"
        self._before = now, seen.wait
        return min(ceiling, max(now + 1, needed)), "starved"


class Tuner:
    """Measures in windows, and says when the number is to change."""

    def __init__(self, meter: LoadingMeter, most: int) -> None:
        self.choice: Tuning | None = None
        self._window = Window(meter)
        self._chooser = Chooser(most)
        self._began = clock()
        self._is_settling = False
        """The number has just changed: this window shows neither the old nor the new one."""

    def note_batch(self, loaders: int) -> int | None:
        """A batch was yielded; the number of loaders from now on, if it changes."""
        if self._window.batches < LEAST_BATCHES or clock() - self._began < LEAST_SECONDS:
            return None
        seen = self._window.take(loaders)
        self._began = clock()
        if self._is_settling:
            self._is_settling = False
            return None
        self.choice = self._chooser.choose(seen)
        self._is_settling = self.choice.loaders != loaders
        return self.choice.loaders if self._is_settling else None
