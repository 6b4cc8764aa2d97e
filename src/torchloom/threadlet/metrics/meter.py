"""What step() writes and a beat reads: numbers in memory, one writer, one reader, no locks.

The writer stores the time at which a step ended in a preallocated ring, then counts the step; the reader reads the
count first and then the ring, so it never sees half a step. Values that may be tensors are only stored (detached, so
that no graph stays alive). Reading them could block on a device, so another thread does it at the time of a beat
(readings.py). Detaching costs more than everything else, so only one loss in 50 ms is stored.

Time in a step that was not training is stored in rings beside it: gaps, which belong to no step; and waiting for peers
and for data, which belongs to the step but is not the rank's own work.
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

from torchloom.protocol.rank import MAX_METRICS, StepTimes
from torchloom.shared.liveness_page import PAUSED, STARTED, STEP

RING = 8192
"""Steps that are remembered."""
_MASK = RING - 1
"""Of more than RING steps between two beats, only the latest are measured."""
MAX_NAME = 64
_MOST = 2**53
"""Integers above this are not exact in every JSON reader, and are not step or sample counts."""
LOSS = "loss"
LOSSES = 64
KEEP_SECONDS = 0.05
"""A loss is stored if none was stored for this long."""


@dataclass(frozen=True)
class Stretch:
    """The steps between two beats."""

    step: int
    times: StepTimes | None
    samples_per_second: float | None


class StepTimeRing:
    """Seconds of each step that went into one activity, such as waiting for data; written by the training thread.

    A slot also holds the number of its step, so that step() need not clear it when the next step begins.
    """

    def __init__(self) -> None:
        self._slots = [(0, 0.0)] * RING
        self.latest = 0
        """The last step that has any; 0 if none ever had."""

    def add(self, step: int, seconds: float) -> None:
        owner, before = self._slots[step & _MASK]
        self._slots[step & _MASK] = (step, before + seconds if owner == step else seconds)
        self.latest = step

    def of(self, step: int) -> float:
        owner, seconds = self._slots[step & _MASK]
        return seconds if owner == step else 0.0

    def less(self, seconds: list[float], first: int) -> list[float]:
        """Durations of the steps from `first` on, without this."""
        if self.latest < first:
            return seconds
        return [max(0.0, whole - self.of(step)) for step, whole in enumerate(seconds, first)]


class Meter:
    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.clock = clock
        self._ring = [0.0] * RING
        """When each of the latest steps ended."""
        self.count = 0
        """Steps of this incarnation."""
        self.marks: memoryview | MutableSequence[int] = [0] * 16
        """Where the step is shown to the agent: the liveness page, or a list that nobody reads."""
        self.thread = threading.get_ident()
        """The training thread; until the first step, the thread that attached."""
        self.over = False
        """This incarnation has said goodbye."""
        self.on_start: Callable[[], None] = lambda: None
        """Called at the first step."""
        self.gaps, self.waiting, self.loading = StepTimeRing(), StepTimeRing(), StepTimeRing()
        """Time that is not part of a step; waiting for peers; waiting for data."""
        self.is_aside = False
        """Such an interval is open: waits inside of it are part of it."""
        self.waits_from: int | None = None
        """Waiting for peers is measured in the steps after this one; None where it cannot be measured."""
        self.has_group = False
        """The rank has peers outside of torch's main process group."""
        self._moved = clock()
        """When something other than a step last showed progress."""
        self._offset = 0
        """Added to the count, this is the step number."""
        self._first = 1
        """Durations are known from the step after this one: its predecessor is in the ring."""
        self._samples: float = 0
        self._read = (0, 0.0)
        """Count and samples at the last beat."""
        self._keep_from = 0.0
        self.values: dict[str, Any] = {}
        """The latest loss and metrics as they were given, tensors detached."""
        self.losses: deque[tuple[int, Any]] = deque(maxlen=LOSSES)
        """The latest stored losses with their steps, to find out when they stopped being finite."""
        self.dropped = 0
        """Values that step() itself rejected."""
        self.complaint = ""
        """Why the latest of them was rejected."""

    @property
    def step_number(self) -> int:
        return self.count + self._offset

    def step(self, loss: Any, samples: Any, step: Any, metrics: dict[str, Any]) -> int:
        """Count a finished step and return its number. Never raises. This is the hot path: keep it short."""
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
                self._keep_loss(loss, now)
            if metrics:
                self._keep(metrics)
        except Exception as error:  # noqa: BLE001  training continues, whatever is passed in
            self._drop(f"{type(error).__name__} from a value given to step()")
        return count + self._offset

    def note(self, loss: Any, samples: Any, metrics: dict[str, Any]) -> None:
        """Store values of the latest step, where a step source counts the steps. Never raises."""
        try:
            if samples is not None:
                self._samples += self._odd_samples(samples)
            if loss is not None and (now := self.clock()) >= self._keep_from:
                self._keep_loss(loss, now)
            self._keep(metrics)
        except Exception as error:  # noqa: BLE001  as in step()
            self._drop(f"{type(error).__name__} from a value given to step()")

    def moved(self) -> None:
        """The training made progress without finishing a step."""
        self._moved = self.clock()

    def resume_at(self, step: int) -> None:
        """Set the number of finished steps, at the start or after a resume."""
        self._offset = self._given(step, self.step_number) - self.count
        self._first = self.count + 1  # the time until the next step is not the duration of a step
        self._moved = self.clock()
        self.marks[STEP] = self.step_number

    def start(self, thread: int) -> None:
        """The first step was made, on this thread."""
        self.thread = thread
        self.marks[STARTED] = 1
        self.on_start()

    @contextmanager
    def aside(self, kind: StepTimeRing) -> Iterator[None]:
        """Measure an interval of the training thread as `kind`; inside another such interval it has no effect."""
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
            last = self._ring[self.count & _MASK]  # a step may have been finished inside
            kind.add(self.count + 1, now - max(began, last))

    @contextmanager
    def paused(self) -> Iterator[None]:
        """An operator has paused the training."""
        try:
            self.marks[PAUSED] = 1
            with self.aside(self.gaps):
                yield
        finally:
            self._moved = self.clock()
            self.marks[PAUSED] = 0

    def idle_seconds(self) -> float:
        """Seconds without a step or other progress."""
        if self.marks[PAUSED]:
            return 0.0
        last = self._ring[self.count & _MASK] if self.count else self._moved
        return max(0.0, self.clock() - max(last, self._moved))

    def median_step_seconds(self) -> float:
        """The median duration of recent steps in seconds; 0 before the second step."""
        return _median(self._durations(self.count, 32)) or 0.0

    def take(self) -> Stretch:
        """The steps since the last call."""
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
        # From last step to last step, so that a beat in the middle of a step does not distort the rate. The first
        # stretch starts with the first step, whose own start and therefore duration is unknown.
        elapsed = sum(durations) * (steps / size)
        gained = (samples - samples_before) * (steps / (count - before))
        return Stretch(count + self._offset, times, gained / elapsed if gained > 0 and elapsed > 0 else None)

    def _durations(self, count: int, most: int) -> list[float]:
        """Durations of the latest steps up to `count`, at most `most` of them, without the gaps."""
        first = max(self._first, count - min(most, RING - 1))
        ends = [self._ring[i & _MASK] for i in range(first, count + 1)]
        return self.gaps.less([later - earlier for earlier, later in itertools.pairwise(ends)], first + 1)

    def _own(self, durations: list[float], first: int) -> float | None:
        """The median time of the rank's own work in a step, where its waiting is measured."""
        since = self.waits_from
        if since is None:
            return None
        measured = durations[max(0, since + 1 - first) :]
        first = max(first, since + 1)
        return _median(self.loading.less(self.waiting.less(measured, first), first))

    def _data(self, first: int, last: int) -> float | None:
        """The median time a step waited for data, if any step ever did."""
        if not self.loading.latest:
            return None
        return _median([self.loading.of(step) for step in range(first, last + 1)])

    def _keep_loss(self, loss: Any, now: float) -> None:
        self._keep_from = now + KEEP_SECONDS
        self.values[LOSS] = kept = _kept(loss)
        self.losses.append((self.step_number, kept))

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
        """Accept numbers of numpy; reject tensors, which would have to be read from a device."""
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
    """A tensor without its autograd graph; anything else unchanged."""
    detach = getattr(value, "detach", None)
    return value if detach is None else detach()
