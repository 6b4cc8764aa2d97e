"""Knobs of the training loader: the number of its processes, and its batch size; and what a script may have watched."""

from __future__ import annotations

import sys
from functools import partial
from typing import Any, Literal, get_args

from torchloom.data.autotune import usable_cores
from torchloom.data.training_loader import LoaderPort
from torchloom.errors import BadInput
from torchloom.knob_validation import BATCH_SIZE, LOADERS
from torchloom.threadlet.changes.knob import Knob, make_knob

BatchSizeAt = Literal["batch", "epoch"]
MOST_LOADERS = 512


def check_watched(what: Any, batch_size_at: str) -> None:
    """Raises BadInput for anything but an optimizer or an ElasticLoader."""
    if batch_size_at not in get_args(BatchSizeAt):
        raise BadInput(f"batch_size_at={batch_size_at!r} is neither 'batch' nor 'epoch'")
    if hasattr(what, "param_groups") or hasattr(what, "change_batch_size"):
        return
    torch_data = sys.modules.get("torch.utils.data")
    hint = "pass an optimizer or an ElasticLoader"
    if torch_data is not None and isinstance(what, torch_data.DataLoader):
        hint = "loader = torchloom.data.ElasticLoader.from_dataloader(loader), then loom.watch(loader)"
    raise BadInput(f"a {type(what).__name__} cannot be watched", hint=hint)


def loaders_knob(loader: LoaderPort) -> Knob:
    return make_knob(
        LOADERS,
        get=lambda: loader.num_workers,
        set=partial(_resize, loader),
        low=0,
        high=loader.most_loaders or max(MOST_LOADERS, loader.num_workers),
        unit="processes",
        help="processes that load data for each rank",
        per="rank",
    )


def batch_size_knob(loader: LoaderPort, at: BatchSizeAt) -> Knob:
    """Ranks that train together must be at the same place of their indices: `place` tells where this one is."""
    knob = make_knob(
        BATCH_SIZE,
        get=lambda: loader.batch_size,
        set=partial(_change_batch_size, loader, at),
        low=1,
        unit="samples",
        help="samples in each batch of a rank" + (", from the next epoch on" if at == "epoch" else ""),
        role="batch_size",
    )
    knob.place = lambda finished: loader.history.place(finished, loader.total())
    return knob


def _resize(loader: LoaderPort, count: Any) -> str:
    loader.resize(count)
    cores = usable_cores()
    return "" if count <= cores else f"more loaders than the {cores:,} core{'' if cores == 1 else 's'} of this process"


def _change_batch_size(loader: LoaderPort, at: BatchSizeAt, size: Any) -> str:
    loader.change_batch_size(size, at=at)
    return "from the next epoch on" if at == "epoch" else ""
