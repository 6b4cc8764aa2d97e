"""The batches of a loader, without those that training is to leave out: `for batch in loom.batches(loader):`.

After a rollback a job may be told to leave out the batches that led there, as the steps they were trained at the first
time. The batch of step S is what is taken while S − 1 steps are finished. So when training gets there, as many batches
as those steps had are taken from the loader and dropped, on every rank alike, and what comes next is trained at step S
instead. A loader that keeps its position in a checkpoint has it right: a dropped batch was taken like any other.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TypeVar

VARIABLE = "TORCHLOOM_SKIP"
T = TypeVar("T")
_STEPS = re.compile(r"(\d{1,18})-(\d{1,18})")
_END = object()


@dataclass
class Skipping:
    """Which steps' batches are left out, and how far that is. It outlives the loader: a new epoch goes on with it."""

    first: int
    last: int
    resumed: int = 0
    """Steps that were finished before this life, for a script that says so only with its first step."""
    over: bool = False
    _left: int = 0
    _at: int = -1
    _taken: int = 0
    """Batches taken since `_at` steps were finished."""
    _each: int = 0
    """Batches that the step before took; 0 while none was seen."""

    @classmethod
    def told(cls, environ: Mapping[str, str]) -> Skipping | None:
        """By whoever started this process."""
        found = _STEPS.fullmatch(environ.get(VARIABLE, ""))
        if found is None or not 1 <= int(found[1]) <= int(found[2]):
            return None
        resumed = environ.get("TORCHLOOM_RESUME_STEP", "")
        return cls(int(found[1]), int(found[2]), int(resumed) if resumed.isdecimal() else 0)

    def due(self, finished: int, each: int = 1) -> int:
        """How many batches are to be dropped before the next is trained. `each` is what a step takes, if not seen."""
        if not self.over:
            finished = finished or self.resumed
            if finished != self._at:
                self._each, self._taken = (self._taken if self._at >= 0 else 0), 0
                self._at = finished
            if finished >= self.last:
                self.over = True  # a checkpoint from after them
            elif finished >= self.first - 1:
                self.over = True
                self._left = (self.last - finished) * (self._each or each)
        return self._left

    def took(self) -> None:
        self._taken += 1

    def dropped(self) -> None:
        self._left -= 1


def batches(
    loader: Iterable[T],
    waiting: Callable[[], AbstractContextManager[None]],
    finished: Callable[[], int],
    skipping: Skipping | None,
    each: Callable[[], int] = lambda: 1,
) -> Iterator[T]:
    """`waiting` is entered while a batch is waited for; `finished` tells how many steps are."""
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
