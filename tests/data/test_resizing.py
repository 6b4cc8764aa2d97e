"""The number of loaders changes in the middle of an epoch, and the batches do not."""

from __future__ import annotations

import random
import threading
from typing import Any

import pytest
import torch

from tests.data.samples import Augmented, Held, Large, Numbers, equal, loaders, processes
from torchloom.data import ElasticLoader
from torchloom.errors import BadInput


def epoch(dataset: Any, count: int = 0, **arguments: Any) -> ElasticLoader:
    torch.manual_seed(11)
    return ElasticLoader(dataset, batch_size=4, shuffle=True, num_workers=count, **arguments)


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("dataset", [Augmented(60), Large(60)], ids=["augmented", "large"])
def test_resizes_at_every_batch_change_nothing(dataset: Numbers, persistent: bool) -> None:
    alone = list(epoch(dataset))
    draw = random.Random(1)
    loader = epoch(dataset, 2, persistent_workers=persistent)
    batches = []
    for batch in loader:
        batches.append(batch)
        loader.resize(draw.choice([0, 1, 2, 3]))
    assert equal(alone, batches)


def test_to_zero_and_back() -> None:
    alone = list(epoch(Augmented(60)))
    loader = epoch(Augmented(60), 2)
    batches = []
    for number, batch in enumerate(loader):
        batches.append(batch)
        if number == 4:
            loader.resize(0)
        if number == 8:
            while loaders():
                pass
        if number == 9:
            loader.resize(2)
            assert loader.num_workers == 2
    assert equal(alone, batches)


def test_a_loader_that_began_without_processes_can_grow() -> None:
    alone = list(epoch(Augmented(40)))
    loader = epoch(Augmented(40))
    batches = []
    seen = 0
    for number, batch in enumerate(loader):
        batches.append(batch)
        seen = max(seen, len(loaders()))
        if number == 2:
            loader.resize(2)
    assert equal(alone, batches)
    assert seen > 0


def test_from_other_threads() -> None:
    alone = list(epoch(Augmented(200)))
    loader = epoch(Augmented(200), 1)
    iterator = iter(loader)
    batches = [next(iterator)]

    def resize(seed: int) -> None:
        draw = random.Random(seed)
        for _ in range(10):
            loader.resize(draw.randrange(4))

    threads = [threading.Thread(target=resize, args=(seed,)) for seed in range(2)]
    for thread in threads:
        thread.start()
    batches += iterator
    for thread in threads:
        thread.join()
    assert equal(alone, batches)


def test_growing_starts_at_once_while_training_waits_for_a_batch() -> None:
    gate: Any = torch.multiprocessing.SimpleQueue()
    loader = ElasticLoader(Held(8, gate), batch_size=1, num_workers=1, prefetch_factor=1)
    iterator = iter(loader)
    batches: list[Any] = []
    waiting = threading.Thread(target=lambda: batches.extend(iterator))
    waiting.start()
    loader.resize(2)
    while len(loaders()) < 2:
        pass
    gate.put(True)
    waiting.join()
    assert [int(batch[0, 0]) for batch in batches] == list(range(8))


def test_loaders_that_finish_their_last_batches_are_reported() -> None:
    gate: Any = torch.multiprocessing.SimpleQueue()
    loader = ElasticLoader(Held(8, gate), batch_size=1, num_workers=2, prefetch_factor=1)
    iterator = iter(loader)
    assert loader.measure().draining == 0
    loader.resize(0)
    measured = loader.measure()
    assert measured.loaders == 0
    assert measured.draining > 0
    gate.put(True)
    assert [int(batch[0, 0]) for batch in iterator] == list(range(8))
    assert loader.measure().draining == 0


def test_persistent_loaders_are_resized_between_epochs() -> None:
    loader = epoch(Numbers(40), 2, persistent_workers=True)
    first = list(loader)
    loader.resize(1)
    while len(loaders()) > 1:
        pass
    loader.resize(3)
    while len(loaders()) < 3:
        pass
    pids = {process.pid for process in loaders()}
    assert len(list(loader)) == len(first)
    assert {process.pid for process in loaders()} == pids
    del loader
    assert processes() == []


def test_the_number_must_be_a_number() -> None:
    loader = ElasticLoader(Numbers(4))
    for bad in (-1, 1.5, True, "2"):
        with pytest.raises(BadInput):
            loader.resize(bad)  # type: ignore[arg-type]
    assert loader.num_workers == 0
