"""Loader processes that are killed: their batches are loaded again, and a batch that kills is named."""

from __future__ import annotations

import contextlib
import os
import signal
import warnings
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from tests.data.samples import Augmented, Deadly, Large, Numbers, equal, is_alive, kill, loaders, processes
from torchloom.data import ElasticLoader
from torchloom.errors import LoaderDied, LoaderTimeout


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


@pytest.mark.parametrize("persistent", [False, True])
def test_a_killed_zygote_ends_its_loaders_and_is_replaced(persistent: bool) -> None:
    alone = list(epoch(Augmented(60)))
    loader = epoch(Augmented(60), 2, persistent_workers=persistent)
    iterator = iter(loader)
    batches = [next(iterator)]
    before = started(3)
    kill_zygote(before)
    with pytest.warns(RuntimeWarning, match="SIGKILL"):
        batches += iterator
    assert equal(alone, batches)
    assert len(list(loader)) == len(alone)


def started(count: int) -> list[psutil.Process]:
    """The zygote and its loaders, when they are this number."""
    while len(found := processes()) < count:
        pass
    return found


def kill_zygote(of: list[psutil.Process]) -> None:
    """And wait: its loaders end with it."""
    while not (zygotes := [process for process in of if process.name() == "loom-zygote"]):
        pass
    kill(zygotes[0])
    while any(map(is_alive, of)):
        pass


class Stuck(Numbers):
    """In a loader, a sample is never loaded."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.training = os.getpid()

    def __getitem__(self, index: int) -> Any:
        while os.getpid() != self.training:
            signal.pause()
        return super().__getitem__(index)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_zygotes_that_keep_dying_are_given_up() -> None:
    iterator = iter(ElasticLoader(Stuck(6), num_workers=1, timeout=0.001, kill_limit=100))
    while not iterator._pool.is_broken:
        kill_zygote(started(2))
        with contextlib.suppress(LoaderDied, LoaderTimeout):
            next(iterator)
    batches: list[torch.Tensor] = []
    with contextlib.suppress(LoaderDied):
        batches.extend(iterator)
    batches.extend(iterator)
    assert [int(batch[0, 0]) for batch in batches] == [1, 2, 3, 4, 5], "without the batch on which loaders died"


def test_a_loader_that_is_stuck_ends_with_its_zygote() -> None:
    iterator = iter(ElasticLoader(Stuck(8), num_workers=2))
    kill_zygote(started(3))
    del iterator


def test_deaths_are_reported_with_what_is_known(tmp_path: Path) -> None:
    loader = ElasticLoader(Deadly(40, 17, tmp_path, times=1), batch_size=4, num_workers=2)
    iterator = iter(loader)
    with pytest.warns(RuntimeWarning) as caught:
        assert len(list(iterator)) == 10
    (pid,) = [int(path.name) for path in tmp_path.iterdir()]
    assert [f"(process {pid}) was killed by SIGKILL" in str(warning.message) for warning in caught] == [True]
    assert caught[0].filename == __file__, "the loop, not our code"
    seen = loader.measure()
    assert seen.deaths == 1
    assert seen.trouble is not None
    assert (seen.trouble.pid, seen.trouble.status) == (pid, -signal.SIGKILL)


def test_many_deaths_are_reported_a_few_times() -> None:
    with pytest.warns(RuntimeWarning) as caught, pytest.raises(LoaderDied):
        list(ElasticLoader(Numbers(8), batch_size=2, num_workers=2, worker_init_fn=leave, kill_limit=40))
    assert "exit code 3" in str(caught[0].message)
    assert 4 <= len(caught) <= 10


def test_a_warning_that_is_an_error_loses_no_batch(tmp_path: Path) -> None:
    iterator = iter(ElasticLoader(Deadly(40, 17, tmp_path, times=1), batch_size=4, num_workers=2))
    batches: list[torch.Tensor] = []
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        with pytest.raises(RuntimeWarning):
            batches.extend(iterator)
        batches.extend(iterator)
    assert torch.equal(torch.cat(batches)[:, 0], torch.arange(40))


def test_processes_have_names() -> None:
    iterator = iter(epoch(Numbers(40), 2))
    next(iterator)
    started(3)
    while (names := sorted(process.name() for process in processes())) != [
        "loom-loader-0",
        "loom-loader-1",
        "loom-zygote",
    ]:
        assert len(names) == 3


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
