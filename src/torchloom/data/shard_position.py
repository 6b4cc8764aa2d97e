"""Where an epoch of an IterableDataset is: how many batches of each shard were yielded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import distributed
from torch.utils.data import DataLoader

from torchloom.data.loading_plan import Batch
from torchloom.data.position import (
    EpochPosition,
    capture_start,
    check_state,
    draw_base_seed,
    is_count,
    plain_start,
    restore_samplers,
)
from torchloom.data.seeding import restore_generators, undisturbed
from torchloom.data.shards import Loaded, ShardPlan, ShardStream, Snapshot
from torchloom.errors import BadState


class ShardPosition(EpochPosition):
    """The progress of one epoch of an IterableDataset."""

    def __init__(self, epoch: int, base_seed: int, start: dict[str, Any], plan: ShardPlan) -> None:
        super().__init__(epoch, base_seed, start)
        self.batch_size = plan.batch_size
        self.ordinals = [0] * plan.shards
        """Of each shard, how many batches were yielded."""
        self.ends: list[int | None] = [None] * plan.shards
        """Of each shard, how many batches it has, once that is known."""
        self.world_size = _world_size()
        self.turn = 0
        """The shard after the one that the last batch was yielded from."""
        self.with_info = plan.with_info
        self.snapshots: list[Snapshot | None] = [None] * plan.shards
        """Of each shard, after the last batch that was yielded, if the dataset has a state."""

    def count(self, batch: Batch, samples: int, result: Any = None) -> Any:
        shard = batch.indices.shard
        if isinstance(result, Loaded):
            self.snapshots[shard] = result.snapshot
            samples, result = result.samples, result.result
        self.batches += 1
        self.samples += samples
        self.ordinals[shard] = batch.indices.ordinal + 1
        self.turn = (shard + 1) % len(self.ordinals)
        return result

    def progress(self) -> Any:
        return self.batches, self.samples, list(self.ordinals), self.turn, list(self.snapshots)

    def go_back(self, progress: Any) -> None:
        self.batches, self.samples, self.ordinals, self.turn, self.snapshots = progress

    def describe(self, batch: Batch) -> str:
        return repr(batch.indices)

    def request(self, batch: Batch) -> Any:
        return replace(batch.indices, snapshot=self.snapshots[batch.indices.shard])

    def state_dict(self) -> dict[str, Any]:
        snapshots = [None if each is None else each.plain() for each in self.snapshots]
        # Only where all before it was yielded: after a resume, a batch that kills loaders now may be loaded.
        ends = [None if end is None or end > done else end for end, done in zip(self.ends, self.ordinals, strict=True)]
        shards = {"ordinals": list(self.ordinals), "ends": ends, "turn": self.turn, "snapshots": snapshots}
        shards |= {"world_size": self.world_size, "with_info": self.with_info}
        return {**super().state_dict(), "shards": shards}


def begin(
    loader: DataLoader[Any], plan: ShardPlan, epoch: int, base_seed: int | None
) -> tuple[ShardPosition, ShardStream]:
    """A new epoch. It draws from the generators as torch's DataLoader does."""
    start = capture_start(loader)
    start["draws_base_seed"] = base_seed is None
    position = ShardPosition(epoch, draw_base_seed(loader) if base_seed is None else base_seed, start, plan)
    return position, ShardStream(position.ordinals, position.ends)


def resume(loader: DataLoader[Any], position: ShardPosition) -> tuple[ShardPosition, ShardStream]:
    """The rest of an epoch. The process's own generators stay as they are; the loader's is where the epoch left it."""
    with undisturbed():
        restore_generators(plain_start(position.start)["process"])
        restore_samplers(loader, position.start)
        if position.start["draws_base_seed"]:
            draw_base_seed(loader)
    return position, ShardStream(position.ordinals, position.ends, position.turn, position.batches)


def read_state(loader: DataLoader[Any], plan: ShardPlan, state: Mapping[str, Any]) -> ShardPosition | None:
    """The position in a state_dict; None if it was saved before the first epoch. BadState as for other datasets."""
    check_state(loader, state)
    if state["epoch"] < 0:
        return None
    shards = state.get("shards")
    if not isinstance(shards, Mapping) or not _is_complete(shards) or sum(shards["ordinals"]) != state["batches"]:
        raise BadState(
            "the state is not one of an IterableDataset, and the loader has an IterableDataset",
            hint="pass what state_dict() of a loader of the same dataset returned",
        )
    count = len(shards["ordinals"])
    if count != plan.shards:
        raise BadState(
            f"the state was saved with {count} shards, and the loader has {plan.shards}",
            hint=f"create the loader with shards={count}; any number of loaders up to that can load them",
        )
    if shards["with_info"] != plan.with_info:
        saved, hint = ("with", "shards=1") if shards["with_info"] else ("without", "num_workers=0")
        raise BadState(
            f"the state was saved {saved} get_worker_info() and worker_init_fn, and the loader has it the other way",
            hint=f"create the loader with {hint}",
        )
    if shards["world_size"] != _world_size():
        raise BadState(
            f"the state was saved with {shards['world_size']} ranks, and there are {_world_size()} now",
            hint="an epoch of an IterableDataset continues with the same number of ranks",
        )
    if state.get("batch_size") != plan.batch_size:
        raise BadState(
            f"the state was saved with batch_size={state.get('batch_size')}, and the loader has {plan.batch_size}",
            hint="an IterableDataset continues with the same batch size",
        )
    position = ShardPosition(state["epoch"], state["base_seed"], state["start"], plan)
    position.batches, position.samples, position.is_over = state["batches"], state["samples"], state["is_over"]
    position.ordinals, position.ends, position.turn = list(shards["ordinals"]), list(shards["ends"]), shards["turn"]
    position.snapshots = [None if each is None else Snapshot(**each) for each in shards["snapshots"]]
    return position


def _is_complete(shards: Mapping[str, Any]) -> bool:
    lists: list[Any] = [shards.get(name) for name in ("ordinals", "ends", "snapshots")]
    ordinals, ends, snapshots = lists
    if not all(isinstance(each, list) and len(each) == len(ordinals) for each in lists):
        return False
    return (
        all(is_count(each) for each in ordinals)
        and all(each is None or (is_count(each) and each >= done) for each, done in zip(ends, ordinals, strict=True))
        and all(
            each is None or (_is_snapshot(each) and each["ordinal"] <= done)
            for each, done in zip(snapshots, ordinals, strict=True)
        )
        and is_count(shards.get("turn"))
        and shards["turn"] < len(ordinals)
        and is_count(shards.get("world_size"))
        and isinstance(shards.get("with_info"), bool)
    )


def _is_snapshot(plain: Any) -> bool:
    if not isinstance(plain, Mapping) or set(plain) != {"ordinal", "samples", "is_over", "state"}:
        return False
    return is_count(plain["ordinal"]) and is_count(plain["samples"]) and isinstance(plain["is_over"], bool)


def _world_size() -> int:
    """Ranks among which the dataset may divide its samples."""
    return distributed.get_world_size() if distributed.is_available() and distributed.is_initialized() else 1
