"""The smallest number of loader processes that keeps training fed.

With `load`, the seconds that one process needs for a batch, and `use`, the seconds for which training uses one, n
processes deliver a batch every load / n seconds. Training is fed if that is below `use`:

    n = load / use, with a margin, rounded up

Both are measured while training runs, in windows of batches. Processes beyond the free cores make `load` longer, so the
number is approached in steps, and a step that did not shorten the waiting is taken back: then the disk, the memory or
the cores are the limit, and more processes do not help. A step down after which training waited is taken back too, and
not repeated until `load / use` is smaller.

The shards of an IterableDataset are loaded in turn, each by one process: the one that has the most decides. Six shards
take as long with five processes as with three, so only 1, 2, 3 and 6 are tried.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from typing import Literal

from torchloom.data.stage_times import LoadingMeter, Window, clock
from torchloom.errors import BadInput
from torchloom.protocol.data_loading import Loading

MARGIN = 1.15
FED = 0.05
"""Training is fed if it waits for at most this share of the time."""
HELPS = 0.8
"""More processes help if the waiting is at most this share of what it was."""
SMALLER = 0.8
"""Fewer processes are tried again if `load / use` is at most this share of what it was when they were not enough."""
LEAST_BATCHES = 32
LEAST_SECONDS = 2.0
"""A window has both, or it is long and has a few batches."""
LONG_SECONDS = 10.0
FEW_BATCHES = 4
CALM = 3
"""Windows in a row that must agree before there are fewer processes."""


Limit = Literal["limit", "cores", "shards"]
Reason = Literal["enough", "starved", "surplus", "no_help"] | Limit


@dataclass(frozen=True, slots=True)
class Tuning:
    """A choice, with the measurements that led to it."""

    loaders: int
    reason: Reason
    """Training is fed; it waited; fewer are enough; more did not help; more are not allowed, because of `most`, the
    number of cores, or the number of shards."""
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
            "no_help": "training still waits, and more did not help",
            "limit": "this is the most that autotune(most=) allows",
            "cores": "there is one for each core; autotune(most=) allows more",
            "shards": "there is one for each shard; create the loader with shards= for more",
        }
        times = f"a batch takes {1000 * self.load:.3g} ms to load, and training uses it for {1000 * self.use:.3g} ms"
        noun = "loader" if self.loaders == 1 else "loaders"
        return f"{self.loaders} {noun}: {because[self.reason]}; {times} and waits {1000 * self.wait:.3g} ms"


class Chooser:
    """Chooses a number after each window. Pure."""

    def __init__(self, most: int, shards: int | None = None, limit: Limit = "limit") -> None:
        """`limit`: where `most` comes from."""
        self._most = most if shards is None else min(most, shards)
        self._limit: Limit = limit if shards is None or most < shards else "shards"
        self._shards = shards
        self._calm = 0
        self._shrunk_from: int | None = None
        """Before the last window, if there were more then."""
        self._floor: tuple[int, float] | None = None
        """Fewer than this were not enough, with this `load / use`."""
        self._before: tuple[int, float] | None = None
        """Before the last growth: the number, and the waiting with it."""
        self._ceiling: int | None = None
        """More than this did not help."""

    def choose(self, seen: Loading) -> Tuning:
        load = seen.read + seen.decode + seen.collate + seen.transfer
        count, reason = self._choose(seen, load)
        return Tuning(count, reason, load, seen.use, seen.wait)

    def _choose(self, seen: Loading, load: float) -> tuple[int, Reason]:
        now, most = seen.loaders, self._most
        if now > most:
            return most, self._limit
        ratio = load / seen.use if seen.use > 0 else math.inf
        needed = self._needed(MARGIN * ratio)
        before, self._before = self._before, None
        shrunk_from, self._shrunk_from = self._shrunk_from, None
        if seen.wait <= FED * (seen.wait + seen.use):
            if self._floor is not None and ratio > SMALLER * self._floor[1]:
                needed = max(needed, self._floor[0])
            self._calm = self._calm + 1 if needed < now else 0
            if self._calm < CALM:
                return now, "enough"
            self._calm = 0
            self._shrunk_from = now
            return needed, "surplus"
        self._calm = 0
        if shrunk_from is not None and now < shrunk_from:
            self._floor = shrunk_from, ratio
            return shrunk_from, "starved"
        if before is not None and now > before[0] and seen.wait > HELPS * before[1]:
            self._ceiling = before[0]
            return before[0], "no_help"
        ceiling = min(most, self._ceiling if self._ceiling is not None else most)
        if now >= ceiling:
            return now, "no_help" if ceiling < most else self._limit
        self._before = now, seen.wait
        return min(ceiling, max(self._more(now), needed)), "starved"

    def _needed(self, busy: float) -> int:
        """The fewest that deliver what this number of processes would if all of them were busy all the time."""
        if busy >= self._most:
            return self._most
        if self._shards is None:
            return max(1, math.ceil(busy))
        each = max(1, math.floor(self._shards / busy)) if busy > 0 else self._shards
        return min(self._most, math.ceil(self._shards / each))

    def _more(self, now: int) -> int:
        """The next number that can be faster."""
        if self._shards is None or now < 1:
            return now + 1
        return math.ceil(self._shards / max(1, math.ceil(self._shards / now) - 1))


class Tuner:
    """Measures in windows, and says when the number is to change."""

    def __init__(self, meter: LoadingMeter, most: int | None, shards: int | None = None) -> None:
        """`most`: by default one loader a core."""
        if most is not None and (not isinstance(most, int) or isinstance(most, bool) or most < 1):
            raise BadInput(f"most={most!r} is not a number of loaders", hint="a positive whole number")
        self.choice: Tuning | None = None
        self._window = Window(meter)
        self._chooser = Chooser(usable_cores(), shards, "cores") if most is None else Chooser(most, shards)
        self._began = clock()
        self._is_settling = False
        """The number has just changed: this window shows neither the old nor the new one."""

    def note_batch(self, loaders: int) -> int | None:
        """A batch was yielded; the number of loaders from now on, if it changes."""
        seconds = clock() - self._began
        least = FEW_BATCHES if seconds >= LONG_SECONDS else LEAST_BATCHES
        if seconds < LEAST_SECONDS or self._window.batches < least:
            return None
        seen = self._window.take(loaders)
        self._began = clock()
        if self._is_settling:
            self._is_settling = False
            return None
        self.choice = self._chooser.choose(seen)
        self._is_settling = self.choice.loaders != loaders
        return self.choice.loaders if self._is_settling else None


def usable_cores() -> int:
    """Cores on which this process may run."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
