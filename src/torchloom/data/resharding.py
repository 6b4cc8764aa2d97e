"""Continue an epoch of a DistributedSampler with another number of ranks: each remaining index is used once.

A DistributedSampler gives index i of the epoch's list to rank i modulo the number of ranks. After s batches' worth of
samples on each of W ranks, the first W·s indices of the list are used; the rest is the list of the new ranks. An epoch
may continue like this several times: each stretch is a segment.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from torch.utils.data import DistributedSampler


class Segment(NamedTuple):
    """A stretch of an epoch with one number of ranks."""

    ranks: int
    samples: int
    """Used by each rank."""


class Share(NamedTuple):
    """Which indices of an epoch a rank uses."""

    ranks: int
    rank: int


def share_of(sampler: Any) -> Share | None:
    """None if the sampler does not share its indices with other ranks in the way of a DistributedSampler."""
    if isinstance(sampler, DistributedSampler) and type(sampler).__iter__ is DistributedSampler.__iter__:
        return Share(sampler.num_replicas, sampler.rank)
    return None


def rest_of_epoch(sampler: DistributedSampler[Any], segments: Iterable[Segment]) -> list[Any]:
    """What is left for this rank after these segments, as a DistributedSampler over the remaining indices gives it."""
    alone = copy.copy(sampler)
    alone.num_replicas, alone.rank = 1, 0
    alone.num_samples = alone.total_size = len(sampler.dataset)
    return deal(remaining(list(alone), segments), Share(sampler.num_replicas, sampler.rank), sampler.drop_last)


def remaining(indices: Sequence[Any], segments: Iterable[Segment]) -> list[Any]:
    used = sum(segment.ranks * segment.samples for segment in segments)  # padding comes last, and is not part of it
    return list(indices[used:])


def deal(indices: list[Any], share: Share, drop_last: bool) -> list[Any]:
    """The share of one rank; all have the same length. Without drop_last the first indices are repeated at the end."""
    if drop_last or not indices:
        even = indices[: len(indices) // share.ranks * share.ranks]
    else:
        total = -(-len(indices) // share.ranks) * share.ranks
        even = (indices * -(-total // len(indices)))[:total]
    return even[share.rank :: share.ranks]
