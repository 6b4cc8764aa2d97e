"""Datasets for the tests of loaders, and what the tests ask about processes, files and batches."""

from __future__ import annotations

import contextlib
import os
import random
import signal
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy
import psutil
import torch
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from torchloom.data import sample_seed

LARGE = 20_000
"""Floats in a sample whose batch does not fit into a message."""


class Numbers(Dataset[Any]):
    """Sample i is i."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Any:
        return torch.tensor([index, index**2])


class Large(Numbers):
    def __getitem__(self, index: int) -> Any:
        return torch.full((LARGE,), float(index))


class Augmented(Numbers):
    """Random numbers of all three generators, in each sample a different number of them."""

    def __getitem__(self, index: int) -> Any:
        drawn = torch.rand(index % 3 + 1).sum()
        return index, drawn, random.random(), numpy.random.rand(index % 2 + 1)[-1]


class Kept(Numbers):
    """Samples in a list of indices at once."""

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [torch.tensor([index, len(indices), torch.randint(1000, ()).item()]) for index in indices]


class Lines(IterableDataset[Any]):
    """Sample i is i. Each worker reads its share, the later ones less."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        for index in range(self.size) if info is None else range(info.id, self.size - 9 * info.id, info.num_workers):
            yield self.sample(index)

    def sample(self, index: int) -> Any:
        return torch.tensor([index, index**2])


class AugmentedLines(Lines):
    """Random numbers of all three generators, in each sample a different number of them."""

    def sample(self, index: int) -> Any:
        drawn = torch.rand(index % 3 + 1).sum()
        return index, drawn, random.random(), numpy.random.rand(index % 2 + 1)[-1]


class Seeded(Numbers):
    """Random numbers of a generator of its own."""

    def __getitem__(self, index: int) -> Any:
        generator = torch.Generator().manual_seed(sample_seed())
        return index, torch.rand(index % 3 + 1, generator=generator).sum()


class Held(Numbers):
    """Sample 0 takes until the test allows it."""

    def __init__(self, size: int, gate: Any) -> None:
        super().__init__(size)
        self.gate = gate

    def __getitem__(self, index: int) -> Any:
        if index == 0:
            self.gate.get()
        return super().__getitem__(index)


class Pair(NamedTuple):
    left: Any
    right: Any


class Record:
    """A type of the user's, that can be pinned."""

    def __init__(self, content: Any) -> None:
        self.content = content
        self.pins = 0

    def pin_memory(self) -> Record:
        self.pins += 1
        return self


class Nested(Numbers):
    def __getitem__(self, index: int) -> Any:
        return {
            "text": f"sample {index}",
            "bytes": bytes([index % 256]),
            "pair": Pair(torch.arange(3) * index, [index, float(index)]),
            "array": numpy.full((2, 2), index, dtype=numpy.float32),
            "tuple": (index, {"deep": torch.full((100, 100), float(index))}),
            "bool": torch.tensor([index % 2 == 0]),
            "half": torch.full((3,), index, dtype=torch.bfloat16),
            "complex": torch.full((2,), index * 1j),
        }


class Failing(Numbers):
    """Fails in sample `at`."""

    def __init__(self, size: int, at: int, error: Exception) -> None:
        super().__init__(size)
        self.at = at
        self.error = error

    def __getitem__(self, index: int) -> Any:
        if index == self.at:
            raise self.error
        return super().__getitem__(index)


class Deadly(Numbers):
    """Kills its process in sample `at`, the first `times` times."""

    def __init__(self, size: int, at: int, folder: Path, times: int = 1_000_000) -> None:
        super().__init__(size)
        self.at = at
        self.folder = folder
        self.times = times

    def __getitem__(self, index: int) -> Any:
        if index == self.at and len(list(self.folder.iterdir())) < self.times:
            (self.folder / str(os.getpid())).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(index)


def equal(left: Any, right: Any) -> bool:
    """Same types, same structure, same bytes."""
    if type(left) is not type(right):
        return False
    if isinstance(left, torch.Tensor):
        same_form = left.dtype == right.dtype and left.shape == right.shape and left.stride() == right.stride()
        return same_form and torch.equal(left, right)
    if isinstance(left, numpy.ndarray):
        return left.dtype == right.dtype and numpy.array_equal(left, right)
    if isinstance(left, Mapping):
        return list(left) == list(right) and all(equal(left[key], right[key]) for key in left)
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(equal, left, right))
    if isinstance(left, Record):
        return left.pins == right.pins and equal(left.content, right.content)
    return bool(left == right)


_others: set[psutil.Process] = set()


def ignore_present_children() -> None:
    """Servers that other tests in this process have started are neither zygotes nor to be killed."""
    _others.clear()
    _others.update(psutil.Process().children())


def _children() -> list[psutil.Process]:
    return [process for process in psutil.Process().children() if process not in _others]


def processes() -> list[psutil.Process]:
    """Zygotes and loaders of this process."""
    found = []
    for child in _children():
        with contextlib.suppress(psutil.NoSuchProcess):
            found += [child, *child.children(recursive=True)]
    return [process for process in found if not _serves_multiprocessing(process)]


def zygotes() -> list[psutil.Process]:
    return [process for process in _children() if not _serves_multiprocessing(process)]


def _serves_multiprocessing(process: psutil.Process) -> bool:
    """The resource tracker, or the fork server (not what it forked): one of each for the life of this process."""
    with contextlib.suppress(psutil.NoSuchProcess):
        words = " ".join(process.cmdline())
        return "resource_tracker" in words or ("multiprocessing.forkserver" in words and process.ppid() == os.getpid())
    return False


def loaders() -> list[psutil.Process]:
    """Loader processes of this process: the children of its zygotes."""
    found = []
    for zygote in zygotes():
        with contextlib.suppress(psutil.NoSuchProcess):
            found += [child for child in zygote.children() if is_alive(child)]
    return found


def is_alive(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.status() != psutil.STATUS_ZOMBIE
    return False


def kill(process: psutil.Process) -> bool:
    """False if it ended by itself."""
    with contextlib.suppress(psutil.NoSuchProcess):
        process.kill()
        return True
    return False


def open_files() -> Counter[str]:
    found: Counter[str] = Counter()
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            found[str(entry.readlink())] += 1
    return found


def slots() -> int:
    """Pieces of shared memory that are mapped into this process."""
    return Path("/proc/self/maps").read_text().count("torchloom-slot")
