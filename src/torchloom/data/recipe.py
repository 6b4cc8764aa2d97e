"""Loads one batch: the same in the training process, in loader processes and in loader threads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torchloom.data.seeding import Seeding, current_sample, seed_sample
from torchloom.data.shards import ShardHost, ShardPlan
from torchloom.data.stage_times import StageTimes, clock, times_of


class Unwanted(BaseException):
    """Nobody waits for this batch any more."""


@dataclass(frozen=True)
class Recipe:
    """How samples become batches: the same in the training process and in every loader."""

    dataset: Any
    collate_fn: Callable[[Any], Any]
    auto_collation: bool
    worker_init_fn: Callable[[int], None] | None
    base_seed: int
    seeding: Seeding | None
    """None for threads: the generators belong to the training loop."""
    shard_plan: ShardPlan | None = None
    """Of an IterableDataset."""

    def host(self, *, in_training: bool) -> ShardHost | None:
        """For the shards that this process loads, if the dataset has shards."""
        if self.shard_plan is None:
            return None
        return ShardHost(self.dataset, self.shard_plan, self.worker_init_fn, self.base_seed, self.seeding, in_training)

    def load(
        self,
        indices: Any,
        position: int,
        key: int,
        host: ShardHost | None = None,
        is_unwanted: Callable[[], bool] | None = None,
    ) -> tuple[Any, StageTimes]:
        """Load and collate one batch, as torch's fetcher does, with the seed of each sample.

        From a host of shards, Loaded or NoBatch. `is_unwanted` is asked before each sample; if it is true, Unwanted is
        raised.
        """
        began = clock()
        outer = current_sample.key, current_sample.position  # of a dataset that iterates over a loader
        try:
            current_sample.key, current_sample.position = key, position
            if host is not None:
                batch, fetched = host.load(indices, key, self.collate_fn)
            else:
                samples = self._fetch(indices, position, key, is_unwanted)
                fetched = clock()
                current_sample.position = position
                batch = self.collate_fn(samples)
        finally:
            current_sample.key, current_sample.position = outer
        return batch, times_of(began, fetched, clock())

    def _fetch(self, indices: Any, position: int, key: int, is_unwanted: Callable[[], bool] | None) -> Any:
        seeded = self.seeding == "sample"
        if not self.auto_collation:
            if seeded:
                seed_sample(key, position)
            return self.dataset[indices]
        if getattr(self.dataset, "__getitems__", None):
            if seeded:
                seed_sample(key, position)
            return self.dataset.__getitems__(indices)
        samples = []
        for place, index in enumerate(indices, position):
            if is_unwanted is not None and is_unwanted():
                raise Unwanted
            current_sample.position = place
            if seeded:
                seed_sample(key, place)
            samples.append(self.dataset[index])
        return samples
