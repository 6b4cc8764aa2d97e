"""The public class: torch's DataLoader with a number of loader processes that changes while it runs.

loader = ElasticLoader(dataset, batch_size=64, shuffle=True, num_workers=4)   # the arguments of DataLoader
for batch in loader:
    ...
    loader.resize(8)                     # at any moment, from any thread
torch.save(loader.state_dict(), path)    # also in the middle of an epoch
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any, get_args

import torch
from torch.utils.data import DataLoader, IterableDataset

from torchloom.data import position, transport
from torchloom.data.dispatcher import KILL_LIMIT, Dispatcher
from torchloom.data.epoch_iterator import EpochIterator, pin_device
from torchloom.data.loader_pool import LoaderPool
from torchloom.data.loader_process import Recipe
from torchloom.data.position import EpochPosition
from torchloom.data.seeding import Seeding
from torchloom.errors import BadDataset, BadInput

PREFETCH = 2
"""The default of torch's DataLoader, for each loader process."""


class ElasticLoader(DataLoader):  # type: ignore[misc]
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
        self._epoch = -1
        self._base_seed: int | None = None
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
        self._lock = threading.Lock()
        self._live: weakref.WeakSet[EpochIterator] = weakref.WeakSet()
        self._pool: LoaderPool | None = None
        """Of persistent workers."""
        self._iterator: EpochIterator | None = None

    @classmethod
    def from_dataloader(cls, loader: DataLoader, *, seeding: Seeding | None = None) -> ElasticLoader:
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
        loads its batches itself.
        """
        if not isinstance(count, int) or isinstance(count, bool) or count < 0:
            raise BadInput(f"the number of loaders is {count!r}", hint="0 or a positive whole number")
        _check_platform(count)
        with self._lock:
            self.num_workers = count
            if count:
                self.prefetch_factor: int | None = self.prefetch_factor or PREFETCH
            for iterator in list(self._live):
                iterator.resize(count)

    def __iter__(self) -> EpochIterator:
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
                length=_length(self._index_sampler),
                timeout=self.timeout,
                pin_device=pinned,
                keep_pool=self.persistent_workers,
            )
            self._live.add(iterator)
            if self.persistent_workers:
                self._iterator = iterator  # between epochs too, `resize` reaches the processes through it
        return iterator

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
