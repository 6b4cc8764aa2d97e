"""Cuts the indices of a sampler into numbered batches; those that were not yielded can be cut again in another size."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

from torchloom.data.loading_plan import Batch


class BatchCutter(Iterator[Batch]):
    """The batches of one epoch, of `size` indices each. It draws like torch's BatchSampler, and no earlier."""

    def __init__(
        self, sampler: Iterable[Any], size: int, drop_last: bool, *, number: int = 0, position: int = 0, skip: int = 0
    ) -> None:
        """`number` batches with `position` indices were yielded before. The first `skip` are of this sampler."""
        self.size = size
        self._sampler = sampler
        self._skip = skip
        self._earlier = position - skip
        self._drop_last = drop_last
        self._number = number
        self._position = position
        self._indices: Iterator[Any] | None = None
        self._again: deque[Any] = deque()
        """Indices that were drawn before."""

    def __next__(self) -> Batch:
        if self._indices is None:  # not earlier: some samplers draw their permutation here
            self._indices = islice(iter(self._sampler), self._skip, None)
        indices = [self._again.popleft() for _ in range(min(self.size, len(self._again)))]
        try:
            indices += islice(self._indices, self.size - len(indices))
        except Exception:  # of the sampler: what it gave before is not lost
            self._again.extend(indices)
            raise
        if len(indices) < self.size and (self._drop_last or not indices):
            self._again.extend(indices)  # in another size they may be a batch
            raise StopIteration
        batch = Batch(self._number, self._position, indices)
        self._number += 1
        self._position += len(indices)
        return batch

    def cut_again(self, size: int, unused: Sequence[Batch]) -> None:
        """Continue in another size. The indices of these batches, the last ones that were drawn, come first."""
        self.size = size
        if unused:
            self._again.extendleft(index for batch in reversed(unused) for index in reversed(batch.indices))
            self._number, self._position = unused[0].number, unused[0].position

    def rest(self, position: int) -> int:
        """Batches after this number of indices. TypeError if the sampler has no length."""
        left = len(self._sampler) + self._earlier - position  # type: ignore[arg-type]
        return left // self.size if self._drop_last else -(-left // self.size)
