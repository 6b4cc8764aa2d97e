"""Random numbers in datasets: one seed for each sample, and the state of the generators of a process.

By default every sample is loaded with generators that are seeded from (base seed, epoch, position of the sample in the
epoch). The random numbers of a sample then do not depend on the loader that loads it.
"""

from __future__ import annotations

import importlib
import random
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.utils.data._utils.worker import _generate_state

from torchloom.errors import BadInput
from torchloom.shared.import_hook import when_imported

Seeding = Literal["sample", "worker"]
_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
"""The increment of SplitMix64."""


def _mix(value: int) -> int:
    """The output function of SplitMix64: neighbouring inputs give unrelated outputs."""
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB & _MASK
    return value ^ (value >> 31)


def epoch_key(base_seed: int, epoch: int) -> int:
    """One number for all samples of an epoch."""
    return _mix((_mix(base_seed & _MASK) + (epoch + 1) * _GOLDEN) & _MASK)


def shard_key(key: int, shard: int) -> int:
    """One number for all samples of a shard in an epoch."""
    return _mix((key + (shard + 1) * _GOLDEN) & _MASK)


class Sample(threading.local):
    """The sample that this thread is loading."""

    key: int | None = None
    """Of its epoch; None if no sample is being loaded."""
    position = 0


current_sample = Sample()


def sample_seed() -> int:
    """The seed of the sample that is being loaded, for a generator of the dataset's own.

        generator = torch.Generator().manual_seed(torchloom.data.sample_seed())

    It depends on the base seed, the epoch and the position of the sample in the epoch, and is the same in processes,
    in threads and with `num_workers=0`. In `__getitems__` and in `collate_fn` it is that of the first sample.
    """
    if current_sample.key is None:
        raise BadInput(
            "sample_seed() was called while no sample is being loaded",
            hint="call it in the dataset or in collate_fn of an ElasticLoader, in the thread that calls those",
        )
    return _seed(current_sample.key, current_sample.position)


def _seed(key: int, position: int) -> int:
    return _mix((key + (position + 1) * _GOLDEN) & _MASK) >> 1  # fits into an int64, as the seeds of torch's workers do


def seed_sample(key: int, position: int) -> None:
    """Seed the generators of torch (CPU), Python and numpy for one sample."""
    seed = _seed(key, position)
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    _numpy.seed(seed & 0xFFFFFFFF)


def seed_process(base_seed: int, loader: int, seeding: Seeding | None) -> int:
    """Seed the generators of a loader process as torch seeds a worker; returns the seed."""
    seed = base_seed + loader
    random.seed(seed)
    if seeding == "worker":
        torch.manual_seed(seed)
    else:
        torch.default_generator.manual_seed(seed)  # not those of devices, which takes 4 ms in a new process
    _numpy.seed(_generate_state(base_seed, loader))
    return seed


class _NumpyGenerator:
    """numpy's global generator. Its import takes 12 ms, which each loader would need before its first batch.

    Where nothing has imported it yet, a seed waits until something does.
    """

    def __init__(self) -> None:
        self._waiting: Any = None
        self._is_watched = False

    @property
    def is_imported(self) -> bool:
        return hasattr(sys.modules.get("numpy.random"), "seed")

    def module(self) -> Any:
        """numpy.random, imported if need be; None without numpy."""
        try:
            return importlib.import_module("numpy.random")
        except ImportError:
            return None

    def seed(self, seed: Any) -> None:
        if self.is_imported:
            sys.modules["numpy.random"].seed(seed)
            return
        self._waiting = seed
        if not self._is_watched:
            self._is_watched = True
            when_imported("numpy.random", self._take_seed)

    def _take_seed(self, module: Any) -> None:
        if self._waiting is not None:
            module.seed(self._waiting)

    def forget(self) -> None:
        """What draws from it next is not seeded by us."""
        self._waiting = None
        if self.is_imported:
            sys.modules["numpy.random"].seed()


_numpy = _NumpyGenerator()


@dataclass(frozen=True, slots=True)
class GeneratorStates:
    """The state of this process's generators, as they give it: quick to take, at the beginning of each epoch."""

    torch: Any
    python: Any = None
    numpy: Any = None

    def plain(self) -> dict[str, Any]:
        """As tensors and values that a checkpoint can contain."""
        states: dict[str, Any] = {"torch": self.torch}
        if self.python is not None:
            version, words, gauss = self.python
            states["python"] = [version, torch.tensor(words), gauss]
        if self.numpy is not None:
            name, keys, place, has_gauss, cached = self.numpy
            words64 = torch.from_numpy(keys.astype("int64"))
            states["numpy"] = [str(name), words64, int(place), int(has_gauss), float(cached)]
        return states

    def restore(self) -> None:
        torch.default_generator.set_state(self.torch)
        if self.python is not None:
            random.setstate(self.python)
        if self.numpy is not None:
            _numpy.module().set_state(self.numpy)
        else:
            _numpy.forget()


def capture_generators(*, only_torch: bool = False, only_imported: bool = False) -> GeneratorStates:
    """`only_imported`: without numpy's generator if nothing has imported it."""
    if only_torch:
        return GeneratorStates(torch.default_generator.get_state())
    numpy = None if only_imported and not _numpy.is_imported else _numpy.module()
    drawn_by_numpy = None if numpy is None else numpy.get_state(legacy=True)
    return GeneratorStates(torch.default_generator.get_state(), random.getstate(), drawn_by_numpy)


def restore_generators(states: dict[str, Any]) -> None:
    torch.default_generator.set_state(states["torch"])
    if "python" in states:
        version, words, gauss = states["python"]
        random.setstate((version, tuple(words.tolist()), gauss))
    if "numpy" in states and (numpy := _numpy.module()) is not None:
        name, keys, *rest = states["numpy"]
        numpy.set_state((name, keys.numpy().astype("uint32"), *rest))


@contextmanager
def undisturbed() -> Iterator[None]:
    """The process's generators have the same state afterwards."""
    states = capture_generators(only_imported=True)
    try:
        yield
    finally:
        states.restore()
