"""Knobs of the training loader: the number of its processes, and its batch size."""

from __future__ import annotations

from functools import partial
from typing import Any, Literal

from torchloom.data.training_loader import LoaderPort
from torchloom.threadlet.changes.knob import Knob, make_knob

LOADERS = "loaders"
MOST_LOADERS = 512


def loaders_knob(loader: LoaderPort) -> Knob:
    return make_knob(
        LOADERS,
        get=lambda: loader.num_workers,
        set=loader.resize,
        low=0,
        high=loader.most_loaders or max(MOST_LOADERS, loader.num_workers),
        unit="processes",
        help="processes that load data for each rank",
        per="rank",
    )


def batch_size_knob(loader: LoaderPort, at: Literal["batch", "epoch"]) -> Knob:
    """Ranks that train together must be at the same place of their indices: `place` tells where this one is."""
    knob = make_knob(
        "batch_size",
        get=lambda: loader.batch_size,
        set=partial(_change_batch_size, loader, at),
        low=1,
        unit="samples",
        help="samples in each batch of a rank" + (", from the next epoch on" if at == "epoch" else ""),
        role="batch_size",
    )
    knob.place = lambda finished: loader.history.place(finished, loader.total())
    return knob


def _change_batch_size(loader: LoaderPort, at: Literal["batch", "epoch"], size: Any) -> str:
    loader.change_batch_size(size, at=at)
    return "from the next epoch on" if at == "epoch" else ""
