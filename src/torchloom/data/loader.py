"""The public class: torch's DataLoader with a number of loader processes that changes while it runs.

loader = ElasticLoader(dataset, batch_size=64, shuffle=True, num_workers=4)   # the arguments of DataLoader
for batch in loader:
    ...
    loader.resize(8)                     # at any moment, from any thread
    loader.change_batch_size(128)        # from the next batch on
torch.save(loader.state_dict(), path)    # also in the middle of an epoch
"""

from __future__ import annotations

import copy
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, TypeVar, Unpack, get_args, get_type_hints

import torch
from torch.utils.data import DataLoader

from torchloom.data import epoch_source, position, training_loader
from torchloom.data.autotune import Tuner, Tuning
from torchloom.data.batch_cutter import BatchCutter
from torchloom.data.dataloader_arguments import OwnArguments, arguments_of, whole_number
from torchloom.data.dispatcher import KILL_LIMIT, Dispatcher
from torchloom.data.epoch_iterator import EpochIterator
from torchloom.data.loaders.pool import Pool
from torchloom.data.loaders.workers import Workers, check_platform, choose_workers, make_pool
from torchloom.data.pinned_memory import pin_device
from torchloom.data.position import EpochPosition
from torchloom.data.recipe import Recipe
from torchloom.data.seeding import Seeding
from torchloom.data.shards import ShardStream, plan_shards, refuse_in_loader
from torchloom.data.stage_times import LoadingMeter, Window
from torchloom.data.training_loader import YieldHistory
from torchloom.errors import BadInput
from torchloom.protocol.data_loading import Loading

_Sample_co = TypeVar("_Sample_co", covariant=True)

PREFETCH = 2
"""The default of torch's DataLoader, for each loader."""


class ElasticLoader(DataLoader[_Sample_co]):  # type: ignore[misc]
    """A DataLoader that can be resized, survives the death of its loader processes, and resumes in mid-epoch.

    It takes the arguments of `torch.utils.data.DataLoader`. Batches, their order and their bytes do not depend on the
    number of loader processes, on resizes or on deaths. With `seeding="sample"`, random numbers in the dataset come
    from generators that are seeded for each sample; with `seeding="worker"` each process is seeded once, as in torch,
    and they depend on which process loads a sample. A batch that was being loaded when `kill_limit` processes died
    raises LoaderDied. An IterableDataset is loaded as a fixed number of `shards`, by default `num_workers`: each one
    is what torch gives one worker.

    With `workers="thread"` the loaders are threads of this process, for datasets that release the GIL. They leave the
    generators of torch, Python and numpy alone: random numbers are the same only if the dataset draws them from a
    generator that it seeds with `torchloom.data.sample_seed()`. None is "thread" on a Python without a GIL (but with
    what needs processes: an IterableDataset, `seeding="worker"`, `multiprocessing_context`), otherwise "process".
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
        shards: int | None = None,
        workers: Workers | None = None,
    ) -> None:
        self.workers: Workers = choose_workers(workers, dataset, seeding, multiprocessing_context)
        if seeding not in get_args(Seeding):
            raise BadInput(f"seeding={seeding!r} is not one of {', '.join(get_args(Seeding))}")
        if not isinstance(kill_limit, int) or kill_limit < 1:
            raise BadInput(f"kill_limit={kill_limit!r} is not a positive whole number")
        num_workers = whole_number("num_workers", num_workers)
        check_platform(self.workers, num_workers)
        self.seeding: Seeding = seeding
        self.kill_limit = kill_limit
        self._plan = plan_shards(dataset, shards, num_workers, batch_size, drop_last)
        self.shards = self._plan.shards if self._plan is not None and self._plan.with_info else None
        self._open()
        self._next_batch_size: int | None = None
        self._next_loaders: int | None = None
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
        """What a copy of a loader does not share with it, nor a forked process."""
        self._process = os.getpid()
        self._lock = threading.RLock()
        self._live: weakref.WeakSet[EpochIterator] = weakref.WeakSet()
        self._pool: Pool | None = None
        """Of persistent workers."""
        self._iterator: EpochIterator | None = None

    @classmethod
    def from_dataloader(cls, loader: DataLoader, **own: Unpack[OwnArguments]) -> ElasticLoader[Any]:
        """An ElasticLoader with the dataset, sampler and settings of a DataLoader, and with arguments of its own."""
        if not isinstance(loader, DataLoader):
            raise BadInput(f"a {type(loader).__name__} is not a DataLoader")
        if type(loader).__iter__ not in (DataLoader.__iter__, cls.__iter__):
            raise BadInput(
                f"{type(loader).__name__} iterates in its own way", hint="create the ElasticLoader from its dataset"
            )
        same = {name: getattr(loader, name) for name in get_type_hints(OwnArguments) if isinstance(loader, cls)}
        arguments = arguments_of(loader) | same | {name: value for name, value in own.items() if value is not None}
        if loader.num_workers == 0 and isinstance(loader, cls) and loader.prefetch_factor is not None:
            elastic = cls(num_workers=1, **arguments)  # its options need a loader at first
            elastic.resize(0)
            return elastic
        return cls(num_workers=loader.num_workers, **arguments)

    def resize(self, count: int) -> None:
        """Change the number of loader processes, at any moment and from any thread.

        New ones start at once. Surplus ones finish the batches that they have, and end. With 0, the training process
        loads its batches itself. It ends `autotune`.
        """
        wanted, count = count, whole_number("count", count)
        if isinstance(wanted, bool) or count < 0:
            raise BadInput(f"the number of loaders is {wanted!r}", hint="0 or a positive whole number")
        if self.most_loaders is not None and count > self.most_loaders:
            raise BadInput(
                f"{count} loaders are more than shards={self.most_loaders}: a shard is loaded by one at a time",
                hint=f"create the loader with shards={count}",
            )
        check_platform(self.workers, count)
        refuse_in_loader()
        self._tuner = None
        self._resize(count)

    def _resize(self, count: int) -> None:
        with self._lock:
            self._next_loaders = None
            self.num_workers = count
            if count:
                self.prefetch_factor: int | None = self.prefetch_factor or PREFETCH
            for iterator in list(self._live):
                iterator.resize(count)

    @property
    def most_loaders(self) -> int | None:
        """The number of shards of an IterableDataset."""
        return None if self._plan is None else self._plan.shards

    @property
    def fixed_batch_size(self) -> str:
        """What fixes the batch size; empty if it can change."""
        if self._plan is not None:
            return "an IterableDataset"
        if self.batch_size is not None:
            return ""
        return "batch_size=None" if self.batch_sampler is None else "a batch_sampler"

    def autotune(self, most: int | None = None) -> None:
        """From now on, run the fewest loader processes that keep training fed; at most `most`, by default one a core.

        It measures how long a batch takes to load and how long training uses one. `tuning` says what it chose, and why.
        """
        check_platform(self.workers, 1)
        refuse_in_loader()
        self._tuner = Tuner(self._meter, most, self.most_loaders)

    @property
    def tuning(self) -> Tuning | None:
        """The latest choice of `autotune`; None before the first, and without it."""
        return self._tuner.choice if self._tuner is not None else None

    def change_batch_size(self, size: int, at: Literal["batch", "epoch"] = "batch") -> None:
        """Change the batch size from the next batch on, or from the next epoch on.

        Batches that were loaded in advance are discarded, and their indices cut again: what follows depends only on
        the batches yielded so far. Every index of the sampler is still used once.
        """
        if not isinstance(size, int) or isinstance(size, bool) or not 1 <= size <= sys.maxsize:
            raise BadInput(f"the batch size is {size!r}", hint="a positive whole number, of 63 bits at most")
        if at not in ("batch", "epoch"):
            raise BadInput(f"at={at!r} is neither 'batch' nor 'epoch'")
        if self.fixed_batch_size:
            raise BadInput(
                f"{self.fixed_batch_size} fixes the batch size when the loader is created",
                hint="it can change for a dataset with __getitem__, with a sampler and a batch_size",
            )
        place = self._resume or self._position
        if at == "batch" and (not self.in_order or (place is not None and place.ahead)):
            raise BadInput("with in_order=False the batch size cannot change in mid-epoch", hint="at='epoch'")
        refuse_in_loader()
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
        if self._process != os.getpid():
            self._open()
        resumed = self._resume
        try:
            return self._begin()
        except BaseException:
            self._resume = resumed  # otherwise the next attempt would begin the next epoch
            raise

    def _begin(self) -> EpochIterator:
        if self._resume is None and self._next_batch_size is not None:  # not for the rest of an epoch
            self._set_batch_size(self._next_batch_size)
        if self._next_loaders is not None:
            self._resize(self._next_loaders)
        pinned = pin_device(self.pin_memory, self.pin_memory_device)
        resumed, self._resume = self._resume, None
        if resumed is not None:
            place, stream = epoch_source.resume(self, resumed)
        else:
            self._epoch += 1
            base_seed = self._base_seed if self.persistent_workers else None
            place, stream = epoch_source.begin(self, self._plan, self._epoch, base_seed)
        self._base_seed = place.base_seed
        self._position = place
        seeding = None if self.workers == "thread" else self.seeding
        recipe = Recipe(
            self.dataset,
            self.collate_fn,
            self._auto_collation,
            self.worker_init_fn,
            place.base_seed,
            seeding,
            self._plan,
        )
        with self._lock:
            dispatcher = Dispatcher(
                stream,
                self.num_workers,
                self.prefetch_factor or PREFETCH,
                in_order=self.in_order,
                keep_idle=self.persistent_workers,
                kill_limit=self.kill_limit,
                end_group=stream.end if isinstance(stream, ShardStream) else None,
            )
            iterator = EpochIterator(
                self._get_pool(recipe),
                dispatcher,
                recipe,
                place,
                cutter=stream if isinstance(stream, BatchCutter) else None,
                length=position.sampler_length(self._index_sampler),
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
        live, seconds = list(self._live), self._meter.hang_seconds()
        hangs = (iterator.find_hang(seconds) for iterator in live)
        trouble = next((hang for hang in hangs if hang is not None), None) or self._meter.recent_death()
        waited = max((iterator.waited() for iterator in live), default=0.0)
        return self._window.take(self.num_workers, trouble, waited, sum(iterator.draining for iterator in live))

    def total(self) -> int:
        """Indices of an epoch; -1 if the sampler has no length."""
        sampler = self.sampler if self._auto_collation else self._index_sampler
        length = position.sampler_length(sampler)  # none of an IterableDataset
        return -1 if length is None else length

    def _note_batch(self, place: EpochPosition) -> Warning | None:
        """A batch was yielded. What there is to warn of."""
        training_loader.note_batch(self, place.epoch, place.samples)
        promised = self._IterableDataset_len_called  # by `len`
        tuner = self._tuner  # another thread may end it
        if tuner is not None and (count := tuner.note_batch(self.num_workers)) is not None:
            if count < self.num_workers and self._plan is not None:
                self._next_loaders = count  # in the next epoch: a shard that moves is loaded again from its beginning
            else:
                self._resize(count)
        if promised is None or place.samples <= promised:
            return None
        return UserWarning(
            f"len() of the IterableDataset is {promised}, and {place.samples} samples were loaded. If every worker"
            " loads all of them, select the share of get_worker_info() in __iter__"
        )

    def __getstate__(self) -> dict[str, Any]:
        """A copy, also in another process, has the settings and the position, and no processes."""
        kept = set(self.__dict__) - {"_lock", "_live", "_pool", "_iterator", "_process"}
        places = {name: copy.deepcopy(self.__dict__[name]) for name in ("_resume", "_position")}  # they will advance
        return {name: self.__dict__[name] for name in kept} | places

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._open()

    def _get_iterator(self) -> EpochIterator:
        return iter(self)

    def _get_pool(self, recipe: Recipe) -> Pool:
        if self._pool is not None and self._pool.is_broken:
            self._pool.close()
            self._pool = None
        pool = self._pool or make_pool(self.workers, recipe, self.multiprocessing_context)
        if self.persistent_workers:
            self._pool = pool
        return pool

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
        place = epoch_source.read_state(self, self._plan, state)
        if self._pool is not None and state["base_seed"] != self._base_seed:
            self._pool.close()  # its loaders have the seed of another run
            self._pool = None
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
