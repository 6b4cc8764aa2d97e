"""The batches of a loader, without those that a rollback leaves out: `for batch in loom.batches(loader):`.

After a rollback a job may leave out the batches that led to it, given as the steps they were first trained at. The
batch of step S is the one taken while S − 1 steps are finished. When training reaches the first of these steps, it
takes as many batches as the steps had from the loader and drops them, the same on every rank, and trains the next one
at step S instead. The position that a loader keeps in a checkpoint stays correct: a dropped batch was taken from it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")
_STEPS = re.compile(r"(\d{1,18})-(\d{1,18})")
_END = object()


@dataclass
class SkippedBatches:
    """Which batches are left out, and how many are left. It outlives the loader: the next epoch continues with it."""

    first: int
    last: int
    resumed: int = 0
    """Steps finished before this start, for a script that reports its step only at its first step()."""
    over: bool = False
    _left: int = 0
    _at: int = -1
    _taken: int = 0
    """Batches taken since `_at` steps were finished."""
    _each: int = 0
    """Batches that the previous step took; 0 before the first."""

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> SkippedBatches | None:
        """As the launcher of this process has set it."""
        steps = _STEPS.fullmatch(environ.get("TORCHLOOM_SKIP", ""))
        if steps is None or not 1 <= int(steps[1]) <= int(steps[2]):
            return None
        return cls(int(steps[1]), int(steps[2]), resumed_step(environ))

    def due(self, finished: int, each: int = 1) -> int:
        """The number of batches to drop before the next one. `each` is the number per step, if none was observed."""
        if not self.over:
            finished = finished or self.resumed
            if finished != self._at:
                self._each, self._taken = (self._taken if self._at >= 0 else 0), 0
                self._at = finished
            if finished >= self.last:
                self.over = True  # the checkpoint is from after these steps
            elif finished >= self.first - 1:
                self.over = True
                self._left = (self.last - finished) * (self._each or each)
        return self._left

    def took(self) -> None:
        self._taken += 1

    def dropped(self) -> None:
        self._left -= 1


def resumed_step(environ: Mapping[str, str]) -> int:
    """Steps finished before this start, as the launcher of this process has set it."""
    text = environ.get("TORCHLOOM_RESUME_STEP", "")
    return int(text) if text.isdecimal() else 0


def batches(
    loader: Iterable[T],
    waiting: Callable[[], AbstractContextManager[None]],
    finished: Callable[[], int],
    skipping: SkippedBatches | None,
    each: Callable[[], int] = lambda: 1,
) -> Iterator[T]:
    """`waiting` is entered while a batch is awaited; `finished` returns the number of finished steps."""
    with waiting():
        source = iter(loader)
    while True:
        with waiting():
            while skipping is not None and skipping.due(finished(), each()) > 0:
                if next(source, _END) is _END:
                    return
                skipping.dropped()
            batch = next(source, _END)
        if batch is _END:
            return
        if skipping is not None:
            skipping.took()
        yield batch  # type: ignore[misc]
