"""What step() writes and a beat reads: numbers in memory, one writer, one reader, no locks.

The writer publishes its whole state with one assignment of a tuple, so the reader never sees half a step. Durations
go into a ring made beforehand. Values that may be tensors are only kept (detached, so that no graph stays alive);
reading them could wait for a device, so it happens elsewhere, at the time of a beat (readings.py).
"""

from __future__ import annotations

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
        self._mark: tuple[int, int, float, float] = (0, 0, 0.0, 0)
        """(durations written, step number, time of the last step or 0, samples so far)"""
        self._read_mark: tuple[int, int, float, float] = self._mark
        self.values: dict[str, Any] = {}
        """The latest loss and metrics as they were given, tensors detached."""
        self.dropped = 0
        """Values refused by step() itself."""
        self.complaint = ""
        """Why the latest of them was."""

    @property
    def step_number(self) -> int:
        return self._mark[1]

    def step(self, loss: Any, samples: Any, step: Any, metrics: dict[str, Any]) -> int:
        """One step was finished; its number. Never raises; this is the path that must stay short."""
        try:
            now = self._clock()
            written, number, last, total = self._mark
            if last:
                self._ring[written & _MASK] = now - last
                written += 1
            if samples is not None:
                plain = samples.__class__ is int and 0 <= samples < _MOST
                total = total + (samples if plain else self._odd_samples(samples))
            number = number + 1 if step is None else self._given(step, number + 1)
            self._mark = (written, number, now, total)
            if loss is not None:
                self.values[LOSS] = loss if loss.__class__ is float else _kept(loss)
            if metrics:
                self._keep(metrics)
        except Exception as error:  # noqa: BLE001  whatever is passed in, training goes on
            self._drop(f"{type(error).__name__} from a value given to step()")
        return self._mark[1]

    def resume_at(self, step: int) -> None:
        """So many steps were finished before this life began."""
        written, _, _, total = self._mark
        self._mark = (written, self._given(step, self._mark[1]), 0.0, total)

    def typical(self) -> float:
        """How long a step takes of late, in seconds; 0 before the second one."""
        written = self._mark[0]
        durations = sorted(self._ring[i & _MASK] for i in range(max(0, written - 32), written))
        return durations[len(durations) // 2] if durations else 0.0

    def take(self) -> Stretch:
        """The steps since this was last called."""
        mark, before = self._mark, self._read_mark
        self._read_mark = mark
        count = mark[0] - before[0]
        if count <= 0:
            return Stretch(mark[1], None, None)
        durations = sorted(self._ring[i & _MASK] for i in range(mark[0] - min(count, RING), mark[0]))
        size = len(durations)
        times = StepTimes(
            count=count, p50=durations[size // 2], p99=durations[min(size - 1, size * 99 // 100)], longest=durations[-1]
        )
        # From last step to last step, so that a beat in the middle of a step makes no ripple. A first stretch begins
        # with the first step, whose own beginning and so whose duration is unknown.
        elapsed = mark[2] - before[2] if before[2] else sum(durations)
        samples = (mark[3] - before[3]) * (1.0 if before[2] else count / (count + 1))
        return Stretch(mark[1], times, samples / elapsed if samples > 0 and elapsed > 0 else None)

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
