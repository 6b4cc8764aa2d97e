"""Processes that the training loop or a dataset forks: their tensors stay as they are, and deaths are seen."""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch.utils.data import DataLoader, default_collate

from tests.data.samples import LARGE, Large, Numbers
from torchloom.data import ElasticLoader


class Gate:
    """Lets another process wait until this one opens it. It is made before the processes that use it."""

    def __init__(self) -> None:
        self._reading, self._writing = os.pipe()

    def open(self) -> None:
        os.write(self._writing, b"x")

    def wait(self) -> None:
        os.read(self._reading, 1)

    def close(self) -> None:
        os.close(self._reading)
        os.close(self._writing)


def test_a_batch_in_a_process_forked_from_training_stays_as_it_is() -> None:
    gate = Gate()
    for number, batch in enumerate(ElasticLoader(Large(40), batch_size=1, num_workers=1)):
        assert float(batch.mean()) == number
        if number == 2:
            child = os.fork()
            if child == 0:
                gate.wait()
                os._exit(0 if bool((batch == 2).all()) else 1)
    gate.open()
    assert os.waitpid(child, 0)[1] == 0
    gate.close()


class Forking(Large):
    """Its loader forks in sample 8, when it has free memory, and waits for the other process in sample 30."""

    def __init__(self, gate: Gate) -> None:
        super().__init__(40)
        self.gate = gate
        self.child = 0

    def __getitem__(self, index: int) -> Any:
        if index == 8:
            self.fork()
        if index == 30:
            self.gate.open()
            if os.waitpid(self.child, 0)[1]:
                raise RuntimeError("memory changed in the process that the dataset forked")
        return super().__getitem__(index)

    def fork(self) -> None:
        kept = default_collate([torch.full((LARGE,), 0.5)])
        self.child = os.fork()
        if self.child == 0:
            self.gate.wait()
            os._exit(0 if bool((kept == 0.5).all()) else 1)


def test_a_tensor_in_a_process_forked_by_a_dataset_stays_as_it_is() -> None:
    gate = Gate()
    batches = list(ElasticLoader(Forking(gate), batch_size=1, num_workers=1, prefetch_factor=1))
    assert [float(batch.mean()) for batch in batches] == list(range(40))
    gate.close()


class CollatingInFork(Forking):
    def fork(self) -> None:
        default_collate([torch.full((LARGE,), -1.0)])  # and is free again
        self.child = os.fork()
        if self.child == 0:
            self.gate.wait()
            default_collate([torch.full((LARGE,), -1.0)])
            os._exit(0)

    def __getitems__(self, indices: list[int]) -> Any:
        (index,) = indices
        if index == 8:
            self.fork()
        batch = default_collate([torch.full((LARGE,), float(index))])
        if index == 8:
            self.gate.open()
            os.waitpid(self.child, 0)
        return batch


def unchanged(batch: Any) -> Any:
    return batch


def test_a_process_forked_by_a_dataset_does_not_collate_into_the_memory_of_its_loader() -> None:
    gate = Gate()
    loader = ElasticLoader(CollatingInFork(gate), 1, num_workers=1, prefetch_factor=1, collate_fn=unchanged)
    for number, batch in enumerate(loader):
        assert bool((batch == number).all())
    gate.close()


class Helped(Numbers):
    """Each loader has a helper process, which lives on. Python's hooks at a fork do not run."""

    def __init__(self, size: int, folder: Path) -> None:
        super().__init__(size)
        self.folder = folder
        self.helper = 0

    def __getitem__(self, index: int) -> Any:
        if self.helper == 0:
            self.helper = ctypes.PyDLL(None).fork()
            if self.helper == 0:
                while True:
                    signal.pause()
            (self.folder / str(self.helper)).touch()
        return os.getpid()


def test_the_death_of_a_loader_is_seen_although_a_process_that_it_forked_lives(tmp_path: Path) -> None:
    try:
        iterator = iter(ElasticLoader(Helped(40, tmp_path), batch_size=None, num_workers=1))
        os.kill(next(iterator), signal.SIGKILL)
        with pytest.warns(RuntimeWarning, match="SIGKILL"):
            assert len(list(iterator)) == 39
    finally:
        helpers = [psutil.Process(int(path.name)) for path in tmp_path.iterdir()]
        for helper in helpers:
            helper.kill()
    assert len(helpers) == 2


class Nesting(Numbers):
    """Uses processes of its own."""

    def __getitem__(self, index: int) -> Any:
        (self.by_multiprocessing if index % 2 else self.by_subprocess)(index)
        return index

    def by_subprocess(self, index: int) -> None:
        subprocess.run([sys.executable, "-S", "-c", f"assert {index} < 4"], check=True)

    def by_multiprocessing(self, index: int) -> None:
        process = multiprocessing.get_context("fork").Process(target=default_collate, args=([torch.rand(LARGE)],))
        process.start()
        process.join()
        assert process.exitcode == 0


class Undaemonic(Nesting):
    """With the usual way around a rule of multiprocessing."""

    def by_multiprocessing(self, index: int) -> None:
        multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
        with multiprocessing.get_context("fork").Pool(2) as pool:
            assert pool.map(abs, range(4)) == [0, 1, 2, 3]
        super().by_multiprocessing(index)


def outcomes(loader: DataLoader[Any]) -> list[Any]:
    found = []
    iterator = iter(loader)
    while True:
        try:
            found.append(next(iterator))
        except StopIteration:
            return found
        except AssertionError:
            found.append("AssertionError")


@pytest.mark.parametrize("dataset", [Nesting(4), Undaemonic(4)], ids=["daemonic", "undaemonic"])
def test_a_dataset_uses_processes_as_in_torch(dataset: Numbers) -> None:
    theirs, ours = (outcomes(kind(dataset, batch_size=None, num_workers=1)) for kind in (DataLoader, ElasticLoader))
    assert ours == theirs
    assert ("AssertionError" in ours) == (type(dataset) is Nesting)


class Ending(Numbers):
    """Ends a process as soon as it has forked it."""

    def __getitem__(self, index: int) -> Any:
        child = os.fork()
        if child == 0:
            while True:
                signal.pause()
        os.kill(child, signal.SIGTERM)
        return os.waitpid(child, 0)[1]


def test_a_process_forked_by_a_dataset_ends_by_sigterm_from_its_beginning() -> None:
    assert list(ElasticLoader(Ending(20), batch_size=None, num_workers=1)) == [signal.SIGTERM] * 20


left_open: list[Any] = []


def iterate(end: str) -> None:
    loader = ElasticLoader(Large(20), batch_size=1, num_workers=2, persistent_workers=end == "persistent")
    iterator = iter(loader)
    numbers = [float(next(iterator).mean()) for _ in range(3)]
    if end == "left open":
        left_open.append(iterator)
    else:
        numbers += [float(batch.mean()) for batch in iterator]
        assert numbers == list(range(20))
    if end == "persistent":
        left_open.append(loader)


@pytest.mark.parametrize(
    ("method", "end"), [("fork", "over"), ("fork", "persistent"), ("fork", "left open"), ("spawn", "left open")]
)
def test_training_in_a_process_of_multiprocessing(method: str, end: str) -> None:
    process = multiprocessing.get_context(method).Process(target=iterate, args=(end,))
    process.start()
    process.join(60)
    assert process.exitcode == 0


@pytest.mark.parametrize("workers", ["process", "thread"])
def test_a_forked_process_has_loaders_of_its_own(workers: Any) -> None:
    loader = ElasticLoader(Numbers(12), batch_size=2, num_workers=1, persistent_workers=True, workers=workers)
    iterator = iter(loader)
    next(iterator)
    child = os.fork()
    if child == 0:
        try:
            with contextlib.suppress(RuntimeError):  # that one belongs to the parent
                next(iterator)
                os._exit(3)
            os._exit(0 if len(list(loader)) == 6 else 4)
        finally:
            os._exit(5)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert len(list(iterator)) == 5
