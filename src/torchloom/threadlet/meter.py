"""What step() writes and a beat reads: numbers in memory, one writer, one reader, no locks.

The writer puts the time at which a step ended into a ring made beforehand, then counts it; the reader takes the count,
then what it counts, so it never sees half a step. Values that may be tensors are only kept (detached, so that no graph
stays alive); reading them could wait for a device, so it happens elsewhere, at the time of a beat (readings.py).
Detaching costs more than all the rest, so where steps are short one loss in twenty milliseconds is kept, not each.

What of a step was no training is noted beside it by whoever knows (spent.py): gaps, which belong to no step; waiting
for peers and for data, which does, but is not what the rank itself needed.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, MutableSequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torchloom.messages import MAX_METRICS, StepTimes
from torchloom.page import PAUSED, STARTED, STEP
from torchloom.threadlet.spent import RING, Spent

_MASK = RING - 1
"""Of more than RING steps between two beats, the latest count."""
MAX_NAME = 64
_MOST = 2**53
"""Whole numbers above this are not exact as JSON numbers everywhere, and are no step or sample count."""
LOSS = "loss"
LOSSES = 64
KEEP_SECONDS = 0.02
"""The loss of a step is kept if none was for so long."""


@dataclass(frozen=True)
class Stretch:
    """The steps between two beats."""

    step: int
    times: StepTimes | None
    samples_per_second: float | None


class Meter:
    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.clock = clock
        self._ring = [0.0] * RING
        """When each of the latest steps ended."""
        self.count = 0
        """Steps of this life."""
        self.marks: memoryview | MutableSequence[int] = [0] * 16
        """Where the step is written for others to see: a page (signs.py), or nowhere."""
        self.thread = threading.get_ident()
        """The one that trains: the one that attached, until the first step is made."""
        self.over = False
        """This life has said goodbye."""
        self.started = False
        self.on_start: Callable[[], None] = lambda: None
        """Called at the first step."""
        self.gaps, self.waiting, self.loading = Spent(), Spent(), Spent()
        """No part of a step; waiting for peers; waiting for data."""
        self.is_aside = False
        """Such a stretch is going on: what happens inside of it is part of it."""
        self.waits_from: int | None = None
        """Waiting for peers is noted in the steps after this one; None where it cannot be known."""
        self.has_group = False
        """It has peers outside of torch's main process group."""
        self._moved = clock()
        """When something other than a step last showed that the training goes on."""
        self._paused = False
        self._offset = 0
        """What makes their number of their count."""
        self._first = 1
        """The first step in the ring whose predecessor is there too is the one after this."""
        self._samples: float = 0
        self._read = (0, 0.0)
        """Count and samples at the last beat."""
        self._keep_from = 0.0
        self.values: dict[str, Any] = {}
        """The latest loss and metrics as they were given, tensors detached."""
        self.losses: deque[tuple[int, Any]] = deque(maxlen=LOSSES)
        """The latest losses that were kept, with their steps: to find out where they went bad."""
        self.dropped = 0
        """Values refused by step() itself."""
        self.complaint = ""
        """Why the latest of them was."""

    @property
    def step_number(self) -> int:
        return self.count + self._offset

    def step(self, loss: Any, samples: Any, step: Any, metrics: dict[str, Any]) -> int:
        """One step was finished; its number. Never raises; this is the path that must stay short."""
        count = self.count + 1
        try:
            now = self.clock()
            self._ring[count & _MASK] = now
            self.count = count
            if samples is not None:
                plain = samples.__class__ is int and 0 <= samples < _MOST
                self._samples += samples if plain else self._odd_samples(samples)
            if step is not None:
                self._offset = self._given(step, count + self._offset) - count
            self.marks[STEP] = count + self._offset
            if count == 1:
                self.start(threading.get_ident())
            if loss is not None and now >= self._keep_from:
                self._keep_from = now + KEEP_SECONDS
                self.values[LOSS] = kept = loss if loss.__class__ is float else _kept(loss)
                self.losses.append((count + self._offset, kept))
            if metrics:
                self._keep(metrics)
        except Exception as error:  # noqa: BLE001  whatever is passed in, training goes on
            self._drop(f"{type(error).__name__} from a value given to step()")
        return count + self._offset

    def note(self, loss: Any, samples: Any, metrics: dict[str, Any]) -> None:
        """What is said of the latest step where someone else counts the steps. Never raises."""
        try:
            if samples is not None:
                self._samples += self._odd_samples(samples)
            if loss is not None and (now := self.clock()) >= self._keep_from:
                self._keep_from = now + KEEP_SECONDS
                self.values[LOSS] = kept = _kept(loss)
                self.losses.append((self.step_number, kept))
            self._keep(metrics)
        except Exception as error:  # noqa: BLE001  as in step()
            self._drop(f"{type(error).__name__} from a value given to step()")

    def moved(self) -> None:
        """The training goes on, though it finished no step."""
        self._moved = self.clock()

    def resume_at(self, step: int) -> None:
        """So many steps were finished before this life began, or went on."""
        self._offset = self._given(step, self.step_number) - self.count
        self._first = self.count + 1  # what lies between is no step
        self._moved = self.clock()
        self.marks[STEP] = self.step_number

    def start(self, thread: int) -> None:
        """A first step was made, on this thread."""
        self.thread = thread
        self.started = True
        self.marks[STARTED] = 1
        self.on_start()

    @contextmanager
    def aside(self, kind: Spent) -> Iterator[None]:
        """The thread that trains does something else in here; within another such stretch it changes nothing."""
        if self.is_aside:
            yield
            return
        began = self.clock()
        try:
            self.is_aside = True
            yield
        finally:
            self.is_aside = False
            now = self._moved = self.clock()
            last = self._ring[self.count & _MASK]  # a step may have been made inside
            kind.add(self.count + 1, now - max(began, last))

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Someone has told the training to stand still."""
        try:
            self._paused = True
            self.marks[PAUSED] = 1
            with self.aside(self.gaps):
                yield
        finally:
            self._moved = self.clock()
            self.marks[PAUSED] = 0
            self._paused = False

    def still(self) -> float:
        """Seconds without a step, or another sign that the training goes on."""
        if self._paused:
            return 0.0
        last = self._ring[self.count & _MASK] if self.count else self._moved
        return max(0.0, self.clock() - max(last, self._moved))

    def typical(self) -> float:
        """How long a step takes of late, in seconds; 0 before the second one."""
        durations = sorted(self._durations(self.count, 32))
        return durations[len(durations) // 2] if durations else 0.0

    def take(self) -> Stretch:
        """The steps since this was last called."""
        samples, count = self._samples, self.count
        before, samples_before = self._read
        self._read = (count, samples)
        durations = self._durations(count, count - before)
        if not durations:
            return Stretch(count + self._offset, None, None)
        size, steps = len(durations), count - max(before, self._first)
        own, data = self._own(durations, count - size + 1), self._data(count - size + 1, count)
        durations.sort()
        times = StepTimes(
            count=steps,
            p50=durations[size // 2],
            p99=durations[min(size - 1, size * 99 // 100)],
            longest=durations[-1],
            own=own,
            data=data,
        )
        # From last step to last step, so that a beat in the middle of a step makes no ripple. A first stretch begins
        # with the first step, whose own beginning and so whose duration is unknown.
        elapsed = sum(durations) * (steps / size)
        gained = (samples - samples_before) * (steps / (count - before))
        return Stretch(count + self._offset, times, gained / elapsed if gained > 0 and elapsed > 0 else None)

    def _durations(self, count: int, most: int) -> list[float]:
        """Of the latest steps up to `count`, at most so many, without the gaps."""
        first = max(self._first, count - min(most, RING - 1))
        ends = [self._ring[i & _MASK] for i in range(first, count + 1)]
        return self.gaps.less([later - earlier for earlier, later in itertools.pairwise(ends)], first + 1)

    def _own(self, durations: list[float], first: int) -> float | None:
        """What the rank itself needed for a step, where its waiting is known."""
        since = self.waits_from
        if since is None:
            return None
        known = durations[max(0, since + 1 - first) :]
        first = max(first, since + 1)
        return _median(self.loading.less(self.waiting.less(known, first), first))

    def _data(self, first: int, last: int) -> float | None:
        """What a step waited for data, where any ever did."""
        if not self.loading.latest:
            return None
        return _median([self.loading.of(step) for step in range(first, last + 1)])

    def _keep(self, metrics: dict[str, Any]) -> None:
        values = self.values
        for name, value in metrics.items():
            if name not in values and not self._room_for(name):
                continue
            values[name] = value if value.__class__ is float else _kept(value)

    def _room_for(self, name: str) -> bool:
        if len(name) > MAX_NAME or not name.isprintable() or not name:
            self._drop(f"a metric name must be printable and have 1 to {MAX_NAME} characters")
        elif len(self.values) - (LOSS in self.values) >= MAX_METRICS:
            self._drop(f"more than {MAX_METRICS} metric names")
        else:
            return True
        return False

    def _odd_samples(self, samples: Any) -> float:
        """numpy's integers and floats count; a tensor would have to be waited for."""
        if not hasattr(samples, "detach") and not isinstance(samples, (str, bytes)):
            number = float(samples)
            if 0 <= number < _MOST:
                return number
        self._drop("samples must be a plain number")
        return 0

    def _given(self, step: Any, otherwise: int) -> int:
        if step.__class__ is int and 0 <= step < _MOST:
            return int(step)
        self._drop("step must be a whole number")
        return otherwise

    def _drop(self, why: str) -> None:
        self.dropped += 1
        self.complaint = why


def _median(seconds: list[float]) -> float | None:
    return sorted(seconds)[len(seconds) // 2] if seconds else None


def _kept(value: Any) -> Any:
    """A tensor without the graph that made it; anything else as it is."""
    detach = getattr(value, "detach", None)
    return value if detach is None else detach()
