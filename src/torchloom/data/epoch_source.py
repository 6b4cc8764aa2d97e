"""Where the batches of an epoch come from: the indices of a sampler, or the shards of an IterableDataset."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch.utils.data import DataLoader

from torchloom.data import position, shard_position
from torchloom.data.loading_plan import Batch
from torchloom.data.position import EpochPosition
from torchloom.data.shard_position import ShardPosition
from torchloom.data.shards import ShardPlan

Source = tuple[EpochPosition, Iterator[Batch]]


def begin(loader: DataLoader[Any], plan: ShardPlan | None, epoch: int, base_seed: int | None) -> Source:
    """A new epoch."""
    if plan is not None:
        return shard_position.begin(loader, plan, epoch, base_seed)
    return position.begin(loader, epoch, base_seed)


def resume(loader: DataLoader[Any], place: EpochPosition) -> Source:
    """The rest of an epoch. It may be called again if it fails."""
    return shard_position.resume(loader, place) if isinstance(place, ShardPosition) else position.resume(loader, place)


def read_state(loader: DataLoader[Any], plan: ShardPlan | None, state: Mapping[str, Any]) -> EpochPosition | None:
    """The position in a state_dict; None if it was saved before the first epoch. BadState, with nothing changed."""
    if plan is not None:
        return shard_position.read_state(loader, plan, state)
    return position.read_state(loader, state)
