"""Whether the loaders of an ElasticLoader are processes or threads."""

from __future__ import annotations

import sys
from typing import Any, Literal, get_args

import torch
from torch.utils.data import IterableDataset

from torchloom.data.loaders import transport
from torchloom.data.loaders.loader_pool import LoaderPool
from torchloom.data.loaders.loader_threads import LoaderThreads
from torchloom.data.loaders.pool import Pool
from torchloom.data.recipe import Recipe
from torchloom.data.seeding import Seeding
from torchloom.errors import BadInput

Workers = Literal["process", "thread"]


def choose_workers(workers: Workers | None, dataset: Any, seeding: Seeding, context: Any) -> Workers:
    """The kind of loaders: threads by default if there is no GIL, and if nothing that was passed needs processes."""
    if workers is not None and workers not in get_args(Workers):
        raise BadInput(f"workers={workers!r} is not one of {', '.join(get_args(Workers))}")
    obstacles = {
        "an IterableDataset": isinstance(dataset, IterableDataset),  # get_worker_info() is one for all threads
        "seeding='worker'": seeding == "worker",
        "multiprocessing_context": context is not None,
    }
    obstacle = next((name for name, is_present in obstacles.items() if is_present), None)
    if workers is None:
        return "thread" if obstacle is None and not _has_gil() else "process"
    if workers == "thread" and obstacle is not None:
        raise BadInput(f"{obstacle} needs loader processes, not threads", hint="use workers='process'")
    return workers


def _has_gil() -> bool:
    is_enabled = getattr(sys, "_is_gil_enabled", None)  # from Python 3.13 on
    return is_enabled is None or bool(is_enabled())


def check_platform(workers: Workers, count: int) -> None:
    if count and workers == "process" and not transport.IS_SUPPORTED:
        raise BadInput("loader processes need Linux", hint="num_workers=0 and workers='thread' work everywhere")


def make_pool(workers: Workers, recipe: Recipe, context: Any) -> Pool:
    """`context`: a multiprocessing context, or None for the default start method."""
    return LoaderThreads(recipe) if workers == "thread" else LoaderPool(recipe, context or torch.multiprocessing)
