"""An IterableDataset as a fixed number of logical shards, which any process can host.

torch gives each worker process an iterator of its own over an IterableDataset and takes one batch from each in turn, so
the samples of an epoch depend on the number of processes. Here that number is the number of shards, which stays. Shard
s sees `get_worker_info()` with id s, and its batches are numbered by `ordinal`. The order of an epoch is that of torch:

    (shard 0, ordinal 0), (shard 1, ordinal 0), …, (shard 0, ordinal 1), …    without those that do not exist

An iterator cannot be moved between processes. A process that is to load a batch of a shard whose iterator it does not
have opens the shard: it iterates over a copy of the dataset from the beginning, and loads and drops the batches before.
If the dataset, or its iterator, has `state_dict` and `load_state_dict`, it begins at the state after the last batch of
the shard that was yielded.
"""

from __future__ import annotations

import copy
import functools
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any

from torch.utils.data import IterableDataset, IterDataPipe
from torch.utils.data._utils import worker

from torchloom.data.loading_plan import Batch
from torchloom.data.seeding import Seeding, current_sample, seed_process, seed_sample, shard_key
from torchloom.data.stage_times import clock
from torchloom.errors import BadDataset, BadInput, BadState


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A shard after some of its batches."""

    ordinal: int
    """Of the next batch."""
    samples: int
    """Taken so far."""
    is_over: bool
    state: Any
    """What `state_dict` of the dataset, or of its iterator, returned."""

    def plain(self) -> dict[str, Any]:
        """As a checkpoint can contain it."""
        return {"ordinal": self.ordinal, "samples": self.samples, "is_over": self.is_over, "state": self.state}


@dataclass(frozen=True, slots=True)
class ShardBatch:
    """Which batch to load: what indices are for a dataset with `__getitem__`."""

    shard: int
    ordinal: int
    snapshot: Snapshot | None = None
    """Where a process that does not have the iterator of this shard begins; None: at the beginning."""

    def __repr__(self) -> str:
        return f"batch {self.ordinal} of shard {self.shard}"


@dataclass(frozen=True, slots=True)
class Loaded:
    """A batch of a shard, and the state after it if the dataset has one."""

    result: Any
    samples: int
    snapshot: Snapshot | None


class NoBatch:
    """In place of a batch: the shard has no more."""


class ShardStream(Iterator[Batch]):
    """The batches of all shards in turn. Whether one exists is known when it was loaded."""

    def __init__(self, ordinals: list[int], ends: list[int | None], turn: int = 0, number: int = 0) -> None:
        """`ordinals`: the next batch of each shard; `ends`: the first one that does not exist, where that is known.

        The first batch comes from the shard whose turn it is.
        """
        self._ordinals = list(ordinals)
        self._ends = ends
        self._left = deque([*range(turn, len(ordinals)), *range(turn)])
        """Shards that may have more, in the order of their turns."""
        self._number = number

    def __next__(self) -> Batch:
        while self._left:
            shard = self._left[0]
            ordinal, end = self._ordinals[shard], self._ends[shard]
            if end is not None and ordinal >= end:
                self._left.popleft()
                continue
            self._left.rotate(-1)
            self._ordinals[shard] += 1
            self._number += 1
            return Batch(self._number - 1, 0, ShardBatch(shard, ordinal), group=shard)
        raise StopIteration

    def end(self, batch: Batch, exists: bool) -> None:
        """The shard of this batch has none after it, nor, if False, this one."""
        wanted, known = batch.indices, self._ends[batch.indices.shard]
        end = wanted.ordinal + exists
        self._ends[wanted.shard] = end if known is None else min(known, end)


@dataclass(frozen=True, slots=True)
class ShardPlan:
    """How an IterableDataset becomes batches."""

    shards: int
    with_info: bool
    """As in a worker process of torch: `get_worker_info()` and `worker_init_fn`. Not for num_workers=0."""
    batch_size: int | None
    drop_last: bool


def plan_shards(
    dataset: Any, shards: int | None, loaders: int, batch_size: int | None, drop_last: bool
) -> ShardPlan | None:
    """None for a dataset that is not iterable. BadInput if the numbers do not fit."""
    if not isinstance(dataset, IterableDataset):
        if shards is not None:
            raise BadInput(f"a {type(dataset).__name__} has no shards", hint="shards= is for an IterableDataset")
        return None
    if isinstance(dataset, IterDataPipe):
        raise BadDataset(
            f"{type(dataset).__name__} is a DataPipe, which torch divides among a fixed number of workers",
            hint="use torch.utils.data.DataLoader for it, or an IterableDataset",
        )
    if shards is not None and (not isinstance(shards, int) or isinstance(shards, bool) or shards < 1):
        raise BadInput(f"shards={shards!r} is not a number of shards", hint="a positive whole number")
    if shards is not None and loaders > shards:
        raise BadInput(
            f"num_workers={loaders} is more than shards={shards}", hint="a shard is loaded by one loader at a time"
        )
    return ShardPlan(shards or max(loaders, 1), shards is not None or loaders > 0, batch_size, drop_last)


class InTraining(worker.WorkerInfo):  # type: ignore[misc]
    """What a shard sees that the training process loads itself."""


def refuse_in_loader() -> None:
    """BadInput in a loader process."""
    if worker._worker_info is not None and not isinstance(worker._worker_info, InTraining):
        raise BadInput("a loader process cannot change its own loader", hint="call this in the training process")


_as_worker_lock = threading.RLock()
"""`get_worker_info()` is the same in all threads of a process, so two of them cannot load shards at once."""


def _forget_other_threads() -> None:
    """In a forked process, where a thread that held the lock does not run."""
    global _as_worker_lock  # noqa: PLW0603
    _as_worker_lock = threading.RLock()


@functools.cache
def _hook_at_fork() -> None:
    """Once in a process that loads shards, and in those forked from it."""
    os.register_at_fork(after_in_child=_forget_other_threads)


class ShardHost:
    """The iterators of one process over the shards that it loads."""

    def __init__(
        self,
        dataset: Any,
        plan: ShardPlan,
        worker_init_fn: Callable[[int], None] | None,
        base_seed: int,
        seeding: Seeding | None,
        in_training: bool,
    ) -> None:
        """`in_training`: this is the training process."""
        _hook_at_fork()
        self._dataset = dataset
        self._plan = plan
        self._worker_init_fn = worker_init_fn
        self._base_seed = base_seed
        self._seeding = seeding
        self._in_training = in_training
        self._original_of: int | None = None
        """The shard that has the dataset itself, because it cannot be copied."""
        self._open: dict[int, _Shard] = {}

    def restart(self) -> None:
        """Another epoch begins."""
        self._open.clear()

    def load(self, wanted: ShardBatch, key: int, collate: Callable[[Any], Any]) -> tuple[Any, float]:
        """Loaded, or NoBatch, and when its samples were fetched. What the dataset raises is raised."""
        shard = self._open.get(wanted.shard)
        if shard is None or shard.ordinal > wanted.ordinal:
            shard = self._open[wanted.shard] = self._open_shard(wanted, key)
        with self._as_worker(wanted.shard, shard.dataset):
            while shard.ordinal < wanted.ordinal and not shard.is_over:
                shard.skip()
            samples = shard.fetch()
            fetched = clock()
            if samples is NoBatch:
                return NoBatch, fetched
            snapshot = shard.snapshot()
        count = 1 if self._plan.batch_size is None else len(samples)
        current_sample.position = shard.samples - count
        return Loaded(collate(samples), count, snapshot), fetched

    def _open_shard(self, wanted: ShardBatch, key: int) -> _Shard:
        number = wanted.shard
        is_new = number != self._original_of
        dataset = self._copy(number) if self._plan.with_info else self._dataset
        with self._as_worker(number, dataset):
            if self._plan.with_info and is_new:
                if self._seeding == "sample" or not self._in_training:  # whose generators stay as they are
                    seed_process(self._base_seed, number, self._seeding)
                if self._worker_init_fn is not None:
                    self._worker_init_fn(number)
            return _Shard(dataset, self._plan, shard_key(key, number), self._seeding, wanted.snapshot)

    def _copy(self, shard: int) -> Any:
        """A shard may change its dataset, and the next one begins with it as it was."""
        if self._original_of == shard:
            return self._dataset
        try:
            return copy.deepcopy(self._dataset, _shared_parts(self._dataset))
        except Exception as error:
            if self._in_training or self._original_of is not None:
                kind = type(self._dataset).__name__
                raise BadDataset(
                    f"{kind} cannot be copied ({error}), and a process that loads several shards of it needs copies",
                    hint="run as many loaders as shards, open files and generators in __iter__, or define __deepcopy__",
                ) from error
            self._original_of = shard
            return self._dataset

    @contextmanager
    def _as_worker(self, shard: int, dataset: Any) -> Iterator[None]:
        if not self._plan.with_info:
            yield
            return
        with _as_worker_lock:
            before = worker._worker_info
            kind = InTraining if self._in_training else worker.WorkerInfo
            seed = self._base_seed + shard
            worker._worker_info = kind(id=shard, num_workers=self._plan.shards, seed=seed, dataset=dataset)
            try:
                yield
            finally:
                worker._worker_info = before


class _Shard:
    """One iterator, and how far it is."""

    def __init__(
        self, dataset: Any, plan: ShardPlan, key: int, seeding: Seeding | None, snapshot: Snapshot | None
    ) -> None:
        self.dataset = dataset
        self.ordinal = 0
        self._plan = plan
        self._key = key
        self._seeding = seeding
        self.samples = 0
        """Taken so far."""
        self.is_over = False
        self._iterator: Any = iter(())
        self._seed()
        if snapshot is not None:
            self.ordinal, self.samples, self.is_over = snapshot.ordinal, snapshot.samples, snapshot.is_over
            if self.is_over:
                return
            if _is_stateful(dataset):
                dataset.load_state_dict(copy.deepcopy(snapshot.state))
        self._iterator = iter(dataset)
        if snapshot is not None and (self._iterator is dataset or not _is_stateful(dataset)):
            if not _is_stateful(self._iterator):
                kind = type(dataset).__name__
                raise BadState(f"a {kind} had a state when this was saved, and has no load_state_dict() now")
            self._iterator.load_state_dict(copy.deepcopy(snapshot.state))

    def _seed(self) -> None:
        current_sample.key, current_sample.position = self._key, self.samples
        if self._seeding == "sample":
            seed_sample(self._key, self.samples)

    def fetch(self) -> Any:
        """The samples of the next batch, or NoBatch: as torch's fetcher."""
        self.ordinal += 1
        if self.is_over:
            return NoBatch
        size = self._plan.batch_size
        if size is None:
            sample = next(self._samples_left(), NoBatch)
            self.is_over = sample is NoBatch
            return sample
        samples = list(islice(self._samples_left(), size))
        self.is_over = len(samples) < size
        if self.is_over and (self._plan.drop_last or not samples):
            return NoBatch
        return samples

    def skip(self) -> None:
        try:
            self.fetch()
        except Exception:  # noqa: BLE001  # it is raised in place of this batch
            return

    def _samples_left(self) -> Iterator[Any]:
        while True:
            self._seed()
            try:
                sample = next(self._iterator)
            except StopIteration:
                return
            self.samples += 1
            yield sample

    def snapshot(self) -> Snapshot | None:
        source = next((each for each in (self.dataset, self._iterator) if _is_stateful(each)), None)
        if source is None:
            return None
        state = None if self.is_over else copy.deepcopy(source.state_dict())  # some have none after their end
        return Snapshot(self.ordinal, self.samples, self.is_over, state)


def _shared_parts(dataset: Any) -> dict[int, Any]:
    """What copies of a dataset share, for deepcopy: files that are mapped into memory, which it would read whole."""
    try:
        from numpy import memmap
    except ImportError:  # torch works without it
        return {}
    return {id(part): part for part in vars(dataset).values() if isinstance(part, memmap)}


def _is_stateful(source: Any) -> bool:
    return hasattr(source, "state_dict") and hasattr(source, "load_state_dict")
