"""A dataset that behaves like images on a slow disk, and the order in which the ranks of a job use it.

A sample waits, as for a disk, and is then decoded. Its bytes depend only on its index.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator

import torch
from torch.utils.data import Dataset, Sampler

from torchloom.data import decoding
from torchloom.shared.division import share, shares_before

_GOLDEN = (math.sqrt(5) - 1) / 2


class SyntheticImages(Dataset[tuple[torch.Tensor, int]]):  # type: ignore[misc]
    """`count` images of random bytes, and a label for each."""

    def __init__(
        self, count: int, pixels: int, classes: int, wait_seconds: float = 0.0, decode_passes: int = 1
    ) -> None:
        self.count, self.pixels, self.classes = count, pixels, classes
        self.wait_seconds = wait_seconds
        """For the disk; a loader process can do nothing else meanwhile."""
        self.decode_passes = decode_passes
        """How often an image is smoothed: work for the processor."""

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        chance = torch.Generator().manual_seed(index)
        content = torch.randint(256, (3, self.pixels, self.pixels), dtype=torch.uint8, generator=chance)
        label = int(torch.randint(self.classes, (), generator=chance))
        if self.wait_seconds:
            time.sleep(self.wait_seconds)
        with decoding():
            image = content.float().div_(255).sub_(0.5)
            for _ in range(self.decode_passes):
                image = torch.nn.functional.avg_pool2d(image, 3, stride=1, padding=1)
        return image, label


class BatchShares(Sampler[int]):  # type: ignore[misc]
    """The indices of one rank for all steps of a job, of which every step has `batch` on all ranks together.

    An epoch uses each of its `epoch_steps * batch` indices once, in an order of its own. A job may begin within its
    first epoch. If the ranks do not divide a batch, the first ones have an index more of each.
    """

    def __init__(
        self,
        steps: int,
        epoch_steps: int,
        batch: int,
        *,
        first_step: int = 0,
        rank: int = 0,
        ranks: int = 1,
        seed: int = 0,
    ) -> None:
        self.steps, self.epoch_steps, self.batch = steps, epoch_steps, batch
        self.first_step = first_step
        self.seed = seed
        self.size = share(batch, ranks, rank)
        self.offset = shares_before(batch, ranks, rank)

    def __len__(self) -> int:
        return self.steps * self.size

    def __iter__(self) -> Iterator[int]:
        for step in range(self.first_step, self.first_step + self.steps):
            epoch, place = divmod(step, self.epoch_steps)
            yield from self._indices(epoch, place)

    def _indices(self, epoch: int, place: int) -> Iterator[int]:
        """Of one step: neighbours in the order of an epoch. Steps of a fixed length visit all indices once."""
        count = self.epoch_steps * self.batch
        stride = _coprime(int(count * _GOLDEN) + self.seed + epoch, count)
        begin = place * self.batch + self.offset
        for position in range(begin, begin + self.size):
            yield (position * stride + self.seed + epoch) % count


def _coprime(number: int, count: int) -> int:
    """The next number that has no divisor in common with `count`."""
    number %= count
    while math.gcd(number, count) != 1:
        number += 1
    return number
