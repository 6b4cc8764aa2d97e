"""The public class: torch's DataLoader with a number of loader processes that changes while it runs.

loader = ElasticLoader(dataset, batch_size=64, shuffle=True, num_workers=4)   # the arguments of DataLoader
for batch in loader:
    ...
    loader.resize(8)                     # at any moment, from any thread
    loader.change_batch_size(128)        # from the next batch on
torch.save(loader.state_dict(), path)    # also in the middle of an epoch
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, TypeVar, get_args

import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from torchloom.data import position, training_loader, transport
from torchloom.data.autotune import Tuner, Tuning
from torchloom.data.batch_cutter import BatchCutter
from torchloom.data.dispatcher import KILL_LIMIT, Dispatcher
from torchloom.data.epoch_iterator import EpochIterator
from torchloom.data.loader_pool import LoaderPool
from torchloom.data.loader_process import Recipe
from torchloom.data.pinned_memory import pin_device
from torchloom.data.position import EpochPosition
from torchloom.data.seeding import Seeding
from torchloom.data.stage_times import LoadingMeter, Window
from torchloom.data.training_loader import YieldHistory
from torchloom.errors import BadDataset, BadInput
from torchloom.protocol.data_loading import Loading

_Sample_co = TypeVar("_Sample_co", covariant=True)

PREFETCH = 2
"""The default of torch's DataLoader, for each loader process."""


class ElasticLoader(DataLoader[_Sample_co]):  # type: ignore[misc]
    """A DataLoader that can be resized, survives the death of its loader processes, and resumes in mid-epoch.

    It takes the arguments of `torch.utils.data.DataLoader`. Batches, their order and their bytes do not depend on the
    number of loader processes, on resizes or on deaths. With `seeding="sample"`, random numbers in the dataset come
    from generators that are seeded for each sample; with `seeding="worker"` each process is seeded once, as in torch,
    and they depend on which process loads a sample. A batch that was being loaded when `kill_limit` processes died
    raises LoaderDied.
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int | None = 1,
        shuffle: bool | None = None,
        sampler: Iterable[Any] | None = None,
        batch_sampler: Iterable[Any] | None = None,
        num_workers: int = 0,
        collate_fn: Callable[[Any], Any] | None = None,
        pin_memory: bool = False,
        drop_last: bool = False,
        timeout: float = 0,
        worker_init_fn: Callable[[int], None] | None = None,
        multiprocessing_context: Any = None,
        generator: torch.Generator | None = None,
        *,
        prefetch_factor: int | None = None,
        persistent_workers: bool = False,
        pin_memory_device: str = "",
        in_order: bool = True,
        seeding: Seeding = "sample",
        kill_limit: int = KILL_LIMIT,
    ) -> None:
        if isinstance(dataset, IterableDataset):
            raise BadDataset(
                f"{type(dataset).__name__} is an IterableDataset, whose samples depend on the number of loaders",
                hint="use torch.utils.data.DataLoader for it, or give the dataset __getitem__ and __len__",
            )
        if seeding not in get_args(Seeding):
            raise BadInput(f"seeding={seeding!r} is not one of {', '.join(get_args(Seeding))}")
        if kill_limit < 1:
            raise BadInput(f"kill_limit={kill_limit} is less than 1")
        _check_platform(num_workers)
        self.seeding: Seeding = seeding
        self.kill_limit = kill_limit
        self._open()
        self._next_batch_size: int | None = None
        self._epoch = -1
        self._base_seed: int | None = None
        self.history = YieldHistory()
        self._meter = LoadingMeter()
        self._window = Window(self._meter)
        self._tuner: Tuner | None = None
        self._position: EpochPosition | None = None
        self._resume: EpochPosition | None = None
        super().__init__(
            dataset,
            batch_size,
            shuffle,
            sampler,
            batch_sampler,
            num_workers,
            collate_fn,
            pin_memory,
            drop_last,
            timeout,
            worker_init_fn,
            multiprocessing_context,
            generator,
            prefetch_factor=prefetch_factor,
            persistent_workers=persistent_workers,
            pin_memory_device=pin_memory_device,
            in_order=in_order,
        )

    def _open(self) -> None:
        """What a copy of a loader does not share with it."""
        self._lock = threading.RLock()
        self._live: weakref.WeakSet[EpochIterator] = weakref.WeakSet()
        self._pool: LoaderPool | None = None
        """Of persistent workers."""
        self._iterator: EpochIterator | None = None

    @classmethod
    def from_dataloader(cls, loader: DataLoader, *, seeding: Seeding | None = None) -> ElasticLoader[Any]:
        """An ElasticLoader with the dataset, sampler and settings of a DataLoader."""
        if not isinstance(loader, DataLoader):
            raise BadInput(f"a {type(loader).__name__} is not a DataLoader")
        if type(loader).__iter__ not in (DataLoader.__iter__, cls.__iter__):
            raise BadInput(
                f"{type(loader).__name__} iterates in its own way", hint="create the ElasticLoader from its dataset"
            )
        if loader.batch_size is not None:
            batching = {"batch_size": loader.batch_size, "sampler": loader.sampler, "drop_last": loader.drop_last}
        elif loader.batch_sampler is not None:
            batching = {"batch_sampler": loader.batch_sampler}
        else:
            batching = {"batch_size": None, "sampler": loader.sampler}
        same = ["dataset", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "generator"]
        same += ["multiprocessing_context", "prefetch_factor", "persistent_workers", "pin_memory_device", "in_order"]
        arguments = {name: getattr(loader, name) for name in same if hasattr(loader, name)}
        own: dict[str, Any] = {}
        if isinstance(loader, cls):
            own = {"kill_limit": loader.kill_limit, "seeding": loader.seeding}
        if seeding is not None:
            own["seeding"] = seeding
        if loader.num_workers == 0 and isinstance(loader, cls) and loader.prefetch_factor is not None:
            elastic = cls(num_workers=1, **arguments, **batching, **own)  # its options need a process at first
            elastic.resize(0)
            return elastic
        return cls(num_workers=loader.num_workers, **arguments, **batching, **own)

    def resize(self, count: int) -> None:
        """Change the number of loader processes, at any moment and from any thread.

        New ones start at once. Surplus ones finish the batches that they have, and end. With 0, the training process
        loads its batches itself. It ends `autotune`.
        """
        if not isinstance(count, int) or isinstance(count, bool) or count < 0:
            raise BadInput(f"the number of loaders is {count!r}", hint="0 or a positive whole number")
        _check_platform(count)
        _check_process()
        self._tuner = None
        self._resize(count)

    def _resize(self, count: int) -> None:
        with self._lock:
            self.num_workers = count
            if count:
                self.prefetch_factor: int | None = self.prefetch_factor or PREFETCH
            for iterator in list(self._live):
                iterator.resize(count)

    def autotune(self, most: int | None = None) -> None:
        """From now on, run the fewest loader processes that keep training fed; at most `most`, by default one a core.

        It measures how long a batch takes to load and how long training uses one. `tuning` says what it chose, and why.
        """
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        if most is not None and (not isinstance(most, int) or isinstance(most, bool) or most < 1):
            raise BadInput(f"most={most!r} is not a number of loaders", hint="a positive whole number")
        _check_platform(1)
        _check_process()
        self._tuner = Tuner(self._meter, cores if most is None else most)

    @property
    def tuning(self) -> Tuning | None:
        """The latest choice of `autotune`; None before the first, and without it."""
        return self._tuner.choice if self._tuner is not None else None

    def change_batch_size(self, size: int, at: Literal["batch", "epoch"] = "batch") -> None:
        """Change the batch size from the next batch on, or from the next epoch on.

        Batches that were loaded in advance are discarded, and their indices cut again: what follows depends only on
        the batches yielded so far. Every index of the sampler is still used once.
        """
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise BadInput(f"the batch size is {size!r}", hint="a positive whole number")
        if at not in ("batch", "epoch"):
            raise BadInput(f"at={at!r} is neither 'batch' nor 'epoch'")
        if self.batch_size is None:
            fixed_by = "batch_size=None" if self.batch_sampler is None else "a batch_sampler"
            raise BadInput(f"{fixed_by} fixes the batch size of this loader", hint="give it a sampler and a batch_size")
        if at == "batch" and not self.in_order:
            raise BadInput("with in_order=False the batch size cannot change in mid-epoch", hint="at='epoch'")
        _check_process()
        with self._lock:
            if at == "epoch":
                self._next_batch_size = size
            else:
                self._set_batch_size(size)
                for iterator in list(self._live):
                    iterator.change_batch_size(size)

    def _set_batch_size(self, size: int) -> None:
        self._next_batch_size = None
        self.batch_sampler.batch_size = size
        self.__dict__["batch_size"] = size  # DataLoader refuses to have it set

    def __len__(self) -> int:
        """Batches in an epoch; after a change in mid-epoch, those of this one."""
        with self._lock:
            cut = next((each for each in self._live if each.is_cut and not each.position.is_over), None)
        return int(super().__len__()) if cut is None else len(cut)

    def __iter__(self) -> EpochIterator:
        if self._next_batch_size is not None:
            self._set_batch_size(self._next_batch_size)
        pinned = pin_device(self.pin_memory, self.pin_memory_device)
        resumed, self._resume = self._resume, None
        if resumed is not None:
            place, stream = position.resume(self, resumed)
        else:
            self._epoch += 1
            place, stream = position.begin(self, self._epoch, self._base_seed if self.persistent_workers else None)
        self._base_seed = place.base_seed
        self._position = place
        recipe = Recipe(
            self.dataset, self.collate_fn, self._auto_collation, self.worker_init_fn, place.base_seed, self.seeding
        )
        with self._lock:
            dispatcher = Dispatcher(
                stream,
                self.num_workers,
                self.prefetch_factor or PREFETCH,
                in_order=self.in_order,
                keep_idle=self.persistent_workers,
                kill_limit=self.kill_limit,
            )
            iterator = EpochIterator(
                self._get_pool(recipe),
                dispatcher,
                recipe,
                place,
                cutter=stream if isinstance(stream, BatchCutter) else None,
                length=_length(self._index_sampler),
                timeout=self.timeout,
                pin_device=pinned,
                keep_pool=self.persistent_workers,
                note=weakref.WeakMethod(self._note_batch),
                meter=self._meter,
            )
            self._live.add(iterator)
            if self.persistent_workers:
                self._iterator = iterator  # between epochs too, `resize` reaches the processes through it
        iterator.begin()  # without the lock: a sampler may call `resize`
        return iterator

    def measure(self) -> Loading:
        """What was measured since the last call, each for one batch: waiting, stages, batches ready, megabytes.

        torchLoom calls this once a second, if this loader feeds the training.
        """
        seconds = self._meter.hang_seconds()
        hangs = (iterator.find_hang(seconds) for iterator in list(self._live))
        trouble = next((hang for hang in hangs if hang is not None), None) or self._meter.recent_death()
        return self._window.take(self.num_workers, trouble)

    def total(self) -> int:
        """Indices of an epoch; -1 if the sampler has no length."""
        length = _length(self.sampler if self._auto_collation else self._index_sampler)
        return -1 if length is None else length

    def _note_batch(self, place: EpochPosition) -> None:
        training_loader.note_batch(self, place.epoch, place.samples)
        if self._tuner is not None and (count := self._tuner.note_batch(self.num_workers)) is not None:
            self._resize(count)

    def __getstate__(self) -> dict[str, Any]:
        """A copy, also in another process, has the settings and the position, and no processes."""
        own = ("_lock", "_live", "_pool", "_iterator")
        return {name: value for name, value in self.__dict__.items() if name not in own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._open()

    def _get_iterator(self) -> EpochIterator:
        return iter(self)

    def _get_pool(self, recipe: Recipe) -> LoaderPool:
        context = self.multiprocessing_context or torch.multiprocessing
        if not self.persistent_workers:
            return LoaderPool(recipe, context)
        if self._pool is not None and self._pool.is_broken:
            self._pool.close()
            self._pool = None
        if self._pool is None:
            self._pool = LoaderPool(recipe, context)
        return self._pool

    def state_dict(self) -> dict[str, Any]:
        """The position in the epoch of the newest iterator, and what its indices were drawn from.

        It does not depend on the number of loaders or on what they have loaded in advance.
        """
        place = self._resume or self._position
        if place is None:
            return position.fresh_state(self, self._base_seed)
        if place.is_over:
            place.start = position.capture_start(self)
        return place.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let the next iteration continue where the state was saved, or begin the epoch after it if that was over."""
        place = position.read_state(self, state)
        if place is None or place.is_over:
            position.restore_samplers(self, state["start"])
            self._resume = None
            self._position = place
        else:
            self._resume = place
        self._epoch = state["epoch"]
        self._base_seed = state["base_seed"]

    def merge_rank_states(self, states: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
        """What to load if the number of ranks has changed: one state from those of all earlier ranks."""
        return position.merge(states)


def _length(sampler: Any) -> int | None:
    try:
        return len(sampler)
    except TypeError:
        return None


def _check_platform(count: int) -> None:
    if count and not transport.IS_SUPPORTED:
        raise BadInput(
            "loader processes need Linux", hint="num_workers=0 works everywhere; otherwise use torch's DataLoader"
        )


def _check_process() -> None:
    if get_worker_info() is not None:
        raise BadInput("a loader process cannot change its own loader", hint="call this in the training process")
