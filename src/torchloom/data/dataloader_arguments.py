"""The arguments of torch's DataLoader, read from a loader that was created with them, and those of an ElasticLoader."""

from __future__ import annotations

import operator
from typing import Any, TypedDict

from torch.utils.data import DataLoader, IterableDataset

from torchloom.data.loaders.workers import Workers
from torchloom.data.seeding import Seeding
from torchloom.errors import BadInput

_SAME = ["dataset", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "generator", "multiprocessing_context"]
_SAME += ["prefetch_factor", "persistent_workers", "pin_memory_device", "in_order"]


class OwnArguments(TypedDict, total=False):
    """What an ElasticLoader takes and torch's DataLoader does not; None is what it was, or the default."""

    seeding: Seeding | None
    kill_limit: int | None
    shards: int | None
    workers: Workers | None


def whole_number(what: str, value: Any) -> int:
    """As an int, also of an integer of numpy or torch. BadInput for anything else."""
    try:
        return operator.index(value)
    except TypeError:
        raise BadInput(f"{what}={value!r} is not a whole number") from None


def arguments_of(loader: DataLoader[Any]) -> dict[str, Any]:
    """Those that give a loader with the same batches, except `num_workers`."""
    same = {name: getattr(loader, name) for name in _SAME if hasattr(loader, name)}
    if isinstance(loader.dataset, IterableDataset):  # torch refuses the sampler that it made itself
        return same | {"batch_size": loader.batch_size, "drop_last": loader.drop_last}
    if loader.batch_size is not None:
        return same | {"batch_size": loader.batch_size, "sampler": loader.sampler, "drop_last": loader.drop_last}
    if loader.batch_sampler is not None:
        return same | {"batch_sampler": loader.batch_sampler}
    return same | {"batch_size": None, "sampler": loader.sampler}
