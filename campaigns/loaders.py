"""Epochs of an ElasticLoader with random resizes, SIGKILLs and batch sizes: no sample is lost, repeated or changed.

A plan is drawn from the seed: the dataset, which may be an IterableDataset, how it is batched, the number of loaders,
and after which batches a loader is killed, the number changes or the batch size does. Each epoch is compared, byte by
byte, with the same epoch loaded without loader processes. Some epochs are left in the middle and continued by another
loader from the saved state. In the end nothing may be left.
"""

from __future__ import annotations

import gc
import random
import time
import warnings
from typing import Any

import torch
from torch.utils.data import Dataset, IterableDataset

from tests.data.samples import (
    Augmented,
    AugmentedLines,
    Large,
    Nested,
    equal,
    ignore_present_children,
    is_alive,
    kill,
    loaders,
    open_files,
    processes,
    slots,
)
from torchloom.data import ElasticLoader

EPOCHS = 10
RESIZES = 80
KILLS = 50
CUTS = 20
"""A campaign of full length has at least these numbers, however long they take."""
FULL_SECONDS = 60.0
MOST_LOADERS = 4


class Tally:
    def __init__(self) -> None:
        self.epochs = self.batches = self.resizes = self.kills = self.cuts = self.resumes = 0

    def is_enough(self) -> bool:
        enough = self.epochs >= EPOCHS and self.resizes >= RESIZES
        return enough and self.kills >= KILLS and self.cuts >= CUTS

    def __str__(self) -> str:
        counts = f"{self.epochs} epochs, {self.batches} batches, {self.resizes} resizes, {self.kills} kills"
        return f"{counts}, {self.cuts} batch sizes, {self.resumes} resumed"


def run(seed: int, seconds: float) -> list[str]:
    warnings.filterwarnings("ignore", message="This DataLoader will create")
    warnings.filterwarnings("ignore", message="loader \\d+ ", category=RuntimeWarning)  # the deaths that are wanted
    draw = random.Random(seed)
    ignore_present_children()  # of other campaigns
    gc.collect()
    files, ends, tally = open_files(), time.monotonic() + seconds, Tally()
    problems: list[str] = []
    while time.monotonic() < ends or (seconds >= FULL_SECONDS and not tally.is_enough()):
        problem = _epoch(draw, tally)
        if problem:
            problems.append(f"epoch {tally.epochs} (seed {seed}): {problem}")
            break
    gc.collect()
    if left := [process for process in processes() if is_alive(process)]:
        problems.append(f"processes are left: {left}")
    if open_files() - files:
        problems.append(f"files are left open: {dict(open_files() - files)}")
    if slots():
        problems.append(f"{slots()} pieces of shared memory are left")
    print(f"  {tally}", flush=True)
    return problems


def _epoch(draw: random.Random, tally: Tally) -> str:
    """One epoch, and what was wrong with it."""
    size = draw.randrange(60, 240)
    dataset: Dataset[Any] = draw.choice([Augmented, Large, Nested, AugmentedLines])(size)
    is_iterable = isinstance(dataset, IterableDataset)
    arguments: dict[str, Any] = {"batch_size": draw.randrange(1, 8), "drop_last": draw.random() < 0.3}
    arguments |= {"shards": MOST_LOADERS} if is_iterable else {"shuffle": True}
    seed = draw.randrange(2**32)

    def make(count: int) -> ElasticLoader:
        torch.manual_seed(seed)
        more: dict[str, Any] = {"persistent_workers": draw.random() < 0.5, "prefetch_factor": draw.randrange(1, 4)}
        return ElasticLoader(dataset, num_workers=count, kill_limit=10_000, **arguments, **(more if count else {}))

    cuts = {draw.randrange(40): draw.randrange(1, 12) for _ in range(0 if is_iterable else draw.randrange(4))}
    expected = []
    alone = make(0)
    for batch in alone:
        expected.append(batch)
        if len(expected) in cuts:
            alone.change_batch_size(cuts[len(expected)])
    loader = make(draw.randrange(1, MOST_LOADERS))
    batches: list[Any] = []
    keep = draw.random() < 0.3
    iterator = iter(loader)
    while (batch := next(iterator, None)) is not None:
        place = len(batches)
        if place >= len(expected):
            return f"a batch after the last one: {batch}"
        if not equal(batch, expected[place]):
            return f"batch {place} differs"
        batches.append(batch if keep else None)
        if len(batches) in cuts:
            arguments["batch_size"] = cuts[len(batches)]
            loader.change_batch_size(arguments["batch_size"])
            tally.cuts += 1
        chance = draw.random()
        if chance < 0.15:
            loader.resize(draw.randrange(MOST_LOADERS + 1))
            tally.resizes += 1
        elif chance < 0.3 and (running := loaders()):
            tally.kills += kill(draw.choice(running))
        elif chance < 0.32:
            state = loader.state_dict()
            loader = make(draw.randrange(MOST_LOADERS))
            loader.load_state_dict(state)
            iterator = iter(loader)
            tally.resumes += 1
    tally.epochs += 1
    tally.batches += len(batches)
    if len(batches) != len(expected):
        return f"{len(batches)} batches in place of {len(expected)}"
    if keep and not equal(batches, expected):
        return "a batch changed after it was yielded"
    return ""
