"""What step() writes and a beat reads: numbers in memory, one writer, one reader, no locks.

The writer puts the time at which a step ended into a ring made beforehand, then counts it; the reader takes the count,
then what it counts, so it never sees half a step. Values that may be tensors are only kept (detached, so that no graph
stays alive); reading them could wait for a device, so it happens elsewhere, at the time of a beat (readings.py).
Detaching costs more than all the rest, so where steps are short one loss in twenty milliseconds is kept, not each.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torchloom.messages import MAX_METRICS, StepTimes

RING = 8192
"""Steps between two beats of which each duration is known; of more, the latest count."""
_MASK = RING - 1
MAX_NAME = 64
_MOST = 2**53
"""Whole numbers above this are not exact as JSON numbers everywhere, and are no step or sample count."""
LOSS = "loss"
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
        self._clock = clock
        self._ring = [0.0] * RING
        """When each of the latest steps ended."""
        self._count = 0
        """Steps of this life."""
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
        self.dropped = 0
        """Values refused by step() itself."""
        self.complaint = ""
        """Why the latest of them was."""

    @property
    def step_number(self) -> int:
        return self._count + self._offset

    def step(self, loss: Any, samples: Any, step: Any, metrics: dict[str, Any]) -> int:
        """One step was finished; its number. Never raises; this is the path that must stay short."""
        count = self._count + 1
        try:
            now = self._clock()
            self._ring[count & _MASK] = now
            self._count = count
            if samples is not None:
                plain = samples.__class__ is int and 0 <= samples < _MOST
                self._samples += samples if plain else self._odd_samples(samples)
            if step is not None:
                self._offset = self._given(step, count + self._offset) - count
            if loss is not None and now >= self._keep_from:
                self._keep_from = now + KEEP_SECONDS
                self.values[LOSS] = loss if loss.__class__ is float else _kept(loss)
            if metrics:
                self._keep(metrics)
        except Exception as error:  # noqa: BLE001  whatever is passed in, training goes on
            self._drop(f"{type(error).__name__} from a value given to step()")
        return count + self._offset

    def resume_at(self, step: int) -> None:
        """So many steps were finished before this life began, or went on."""
        self._offset = self._given(step, self.step_number) - self._count
        self._first = self._count + 1  # what lies between is no step

    def typical(self) -> float:
        """How long a step takes of late, in seconds; 0 before the second one."""
        durations = self._durations(self._count, 32)
        return durations[len(durations) // 2] if durations else 0.0

    def take(self) -> Stretch:
        """The steps since this was last called."""
        samples, count = self._samples, self._count
        before, samples_before = self._read
        self._read = (count, samples)
        durations = self._durations(count, count - before)
        if not durations:
            return Stretch(count + self._offset, None, None)
        size, steps = len(durations), count - max(before, self._first)
        times = StepTimes(
            count=steps,
            p50=durations[size // 2],
            p99=durations[min(size - 1, size * 99 // 100)],
            longest=durations[-1],
        )
        # From last step to last step, so that a beat in the middle of a step makes no ripple. A first stretch begins
        # with the first step, whose own beginning and so whose duration is unknown.
        elapsed = sum(durations) * (steps / size)
        gained = (samples - samples_before) * (steps / (count - before))
        return Stretch(count + self._offset, times, gained / elapsed if gained > 0 and elapsed > 0 else None)

    def _durations(self, count: int, most: int) -> list[float]:
        """Of the latest steps up to `count`, at most so many, sorted."""
        first = max(self._first, count - min(most, RING - 1))
        ends = [self._ring[i & _MASK] for i in range(first, count + 1)]
        return sorted(later - earlier for earlier, later in itertools.pairwise(ends))

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


def _kept(value: Any) -> Any:
    """A tensor without the graph that made it; anything else as it is."""
    detach = getattr(value, "detach", None)
    return value if detach is None else detach()
