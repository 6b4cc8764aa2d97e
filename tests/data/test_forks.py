"""Processes that the training loop or a dataset forks: their tensors stay as they are, and deaths are seen."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch.utils.data import default_collate

from tests.data.samples import LARGE, Large
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
