"""Loader processes that are killed: their batches are loaded again, and a batch that kills is named."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.data.samples import Augmented, Deadly, Large, Numbers, equal, is_alive, kill, loaders, processes, zygotes
from torchloom.data import ElasticLoader
from torchloom.errors import LoaderDied


def epoch(dataset: Any, count: int = 0, **arguments: Any) -> ElasticLoader:
    torch.manual_seed(11)
    return ElasticLoader(dataset, batch_size=4, shuffle=True, num_workers=count, **arguments)


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("dataset", [Augmented(80), Large(80)], ids=["augmented", "large"])
def test_killed_loaders_are_replaced_and_no_batch_is_lost_or_changed(dataset: Numbers, persistent: bool) -> None:
    alone = list(epoch(dataset))
    batches = []
    killed = 0
    for number, batch in enumerate(epoch(dataset, 2, persistent_workers=persistent, kill_limit=1000)):
        batches.append(batch)
        if number % 3 == 0:
            for process in loaders()[: 1 + number % 2]:
                killed += kill(process)
    assert killed >= 7
    assert equal(alone, batches)


def test_one_death_is_survived(tmp_path: Path) -> None:
    batches = list(ElasticLoader(Deadly(40, 17, tmp_path, times=2), batch_size=4, num_workers=2))
    assert torch.equal(torch.cat(batches)[:, 0], torch.arange(40))
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize("limit", [1, 3])
def test_a_batch_that_kills_its_loaders_raises_an_error_with_its_indices(tmp_path: Path, limit: int) -> None:
    loader = ElasticLoader(Deadly(40, 17, tmp_path), batch_size=4, num_workers=2, kill_limit=limit)
    iterator = iter(loader)
    assert [int(next(iterator)[0, 0]) for _ in range(4)] == [0, 4, 8, 12]
    with pytest.raises(LoaderDied) as caught:
        next(iterator)
    assert (caught.value.batch, caught.value.indices, caught.value.deaths) == (4, [16, 17, 18, 19], limit)
    assert isinstance(caught.value, RuntimeError)
    assert len(list(tmp_path.iterdir())) == limit
    assert [int(batch[0, 0]) for batch in iterator] == [20, 24, 28, 32, 36], "the others continue, as with torch"


def test_all_loaders_killed_at_once() -> None:
    alone = list(epoch(Augmented(60)))
    iterator = iter(epoch(Augmented(60), 3, prefetch_factor=3))
    batches = [next(iterator)]
    for process in loaders():
        process.kill()
    assert equal(alone, batches + list(iterator))


def test_without_its_zygote_an_epoch_continues_and_the_next_has_a_new_one() -> None:
    alone = list(epoch(Augmented(60)))
    loader = epoch(Augmented(60), 2, persistent_workers=True)
    iterator = iter(loader)
    batches = [next(iterator)]
    (zygote,) = zygotes()
    zygote.kill()
    while is_alive(zygote):
        pass
    with pytest.warns(RuntimeWarning):
        batches.append(next(iterator))
    loader.resize(0)
    batches += iterator
    assert equal(alone, batches)
    loader.resize(2)
    assert len(list(loader)) == len(alone)
    assert len(loaders()) == 2


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_the_whole_group_leaves_loaders_to_training(number: int) -> None:
    iterator = iter(epoch(Augmented(60), 2))
    next(iterator)
    while len(processes()) < 3:
        pass
    before = {process.pid for process in processes()}
    for process in processes():
        process.send_signal(number)
    next(iterator)
    assert {process.pid for process in processes()} == before


def leave(loader: int) -> None:
    os._exit(3)


def test_loaders_that_die_as_soon_as_they_start_are_reported() -> None:
    with pytest.raises(LoaderDied):
        list(ElasticLoader(Numbers(8), batch_size=2, num_workers=2, worker_init_fn=leave))
