"""The iterator over one epoch: it carries out what the dispatcher plans, and yields what it returns."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch._utils import ExceptionWrapper
from torch.utils.data._utils import pin_memory

from torchloom.data import dispatcher as plans
from torchloom.data.batch_cutter import BatchCutter
from torchloom.data.dispatcher import Batch, Dispatcher
from torchloom.data.loader_pool import Arrived, Died, LoaderPool, ZygoteDied
from torchloom.data.loader_process import Recipe
from torchloom.data.position import EpochPosition, batch_samples
from torchloom.data.seeding import epoch_key, undisturbed
from torchloom.data.stage_times import LoadingMeter, clock
from torchloom.errors import LoaderDied, LoaderTimeout


class EpochIterator(Iterator[Any]):
    """Yields the batches of an epoch. Its loaders and its batch size can be changed at any moment, from any thread.

    What is requested while this object is at work, by another thread, a sampler or a signal handler, is stored and
    carried out when that work is done: nobody waits for a lock.
    """

    def __init__(
        self,
        pool: LoaderPool,
        dispatcher: Dispatcher,
        recipe: Recipe,
        position: EpochPosition,
        *,
        cutter: BatchCutter | None,
        length: int | None,
        timeout: float,
        pin_device: str | None,
        keep_pool: bool,
        note: Callable[[], Callable[[EpochPosition], None] | None],
        meter: LoadingMeter,
    ) -> None:
        """Call `begin` next."""
        self.position = position
        self._pool = pool
        self._dispatcher = dispatcher
        self._recipe = recipe
        self._cutter = cutter
        self._length = length
        self._timeout = timeout
        self._pin_device = pin_device
        self._keep_pool = keep_pool
        self._note = note
        self._meter = meter
        self._yielded_at: float | None = None
        self._key = epoch_key(position.base_seed, position.epoch)
        self._wanted_loaders = dispatcher.target
        self._wanted_size = cutter.size if cutter is not None else 0
        self._is_at_work = False
        self._epoch = -1
        self.is_cut = bool(position.segments)
        """The batch size, or the number of ranks, was changed in this epoch."""

    def begin(self) -> None:
        """Start the first loaders."""
        with self._pool.lock:
            self._pool.epoch += 1
            self._epoch = self._pool.epoch
            for loader in self._pool.loaders:
                self._dispatcher.adopt(loader)
            with self._at_work():
                self._carry_out(may_fork=True)
        self._apply_requests()

    def __len__(self) -> int:
        if self._cutter is not None and self.is_cut:
            return self.position.batches + self._cutter.rest(self.position.samples)
        if self._length is None:
            raise TypeError("the sampler has no length")
        return self._length

    @property
    def recut(self) -> int:
        """Batches that were loaded in advance and cut again."""
        return self._dispatcher.recut

    def resize(self, target: int) -> None:
        self._wanted_loaders = target
        self._apply_requests()

    def change_batch_size(self, size: int) -> None:
        """Cut the indices that were not yielded yet into batches of another size."""
        self._wanted_size = size
        self._apply_requests()

    def _apply_requests(self) -> None:
        while self._has_requests() and self._pool.lock.acquire(blocking=False):  # otherwise its holder does this next
            try:
                if self._is_at_work:
                    return  # in this very thread, further up
                with self._at_work():
                    self._dispatcher.resize(self._wanted_loaders)
                    if self._cutter is not None and self._is_to_be_cut():
                        self.is_cut = True
                        unused = self._dispatcher.discard()
                        self._meter.recut += len(unused)
                        self._cutter.cut_again(self._wanted_size, unused)
                    self._carry_out(may_fork=False)
            finally:
                self._pool.lock.release()

    @contextmanager
    def _at_work(self) -> Iterator[None]:
        """The caller holds the lock of the pool."""
        self._is_at_work = True
        try:
            yield
        finally:
            self._is_at_work = False

    def _has_requests(self) -> bool:
        if self._pool.epoch != self._epoch or not self._pool.close.alive:
            return False
        return self._wanted_loaders != self._dispatcher.target or self._is_to_be_cut()

    def _is_to_be_cut(self) -> bool:
        return self._cutter is not None and self._wanted_size != self._cutter.size and not self.position.is_over

    @property
    def loaders(self) -> int:
        """Loader processes now, including those that finish their last batches."""
        return len(self._pool.loaders)

    def close(self) -> None:
        """End the iteration, and its loader processes unless they are persistent."""
        with self._pool.lock:
            self.position.is_over = True
            if not self._keep_pool:
                self._pool.close()

    def __next__(self) -> Any:
        result = self._next_result()
        if isinstance(result, ExceptionWrapper):
            del self  # the exception is in a reference cycle with this frame, and must not keep the loaders alive
            result.reraise()
        if self._pin_device is not None:
            return pin_memory.pin_memory(result, self._pin_device)
        return result

    def _next_result(self) -> Any:
        began = clock()
        while True:
            with self._pool.lock:
                if self.position.is_over:
                    raise StopIteration
                if self._pool.epoch != self._epoch:
                    raise RuntimeError("a later iteration of this loader with persistent_workers has begun")
                with self._at_work():
                    outcome = self._advance()
            self._apply_requests()
            match outcome:
                case plans.Yield(batch=batch, result=result):
                    self._count(batch)
                    self._measure(began, self._dispatcher.ready)
                    return result
                case plans.LoadHere(batch=batch):
                    self._count(batch)
                    result = self._load(batch)
                    self._measure(began, 0)
                    return result
                case plans.KilledLoaders(batch=batch):
                    self._count(batch)
                    raise LoaderDied(batch.number, batch.indices, batch.kills)
                case plans.LoadersKeepDying():
                    raise LoaderDied(None, None, plans.IDLE_DEATHS)
                case plans.End():
                    self.close()
                    raise StopIteration
            if not self._pool.wait(self._timeout or None):
                raise LoaderTimeout(self._timeout)

    def _advance(self) -> plans.Outcome:
        self._read()
        outcome = self._dispatcher.take()
        self._carry_out(may_fork=True)
        return self._dispatcher.take() if isinstance(outcome, plans.Wait) else outcome

    def _read(self) -> None:
        for event in self._pool.events():
            match event:
                case Arrived():
                    self._dispatcher.arrived(event.loader, event.number, event.result)
                    self._meter.loaded(event.times, event.received, event.size)
                case Died():
                    self._dispatcher.died(event.loader)
                    self._meter.deaths += 1
                case ZygoteDied():
                    self._lose_zygote()

    def _lose_zygote(self) -> None:
        self._dispatcher.cannot_start()
        self._pool.is_broken = True
        warnings.warn(
            "the process from which loader processes are started has died: no more can be started in this epoch,"
            " and without any the training process loads its batches itself",
            RuntimeWarning,
            stacklevel=2,
        )

    def _carry_out(self, *, may_fork: bool) -> None:
        if not self._pool.has_zygote:
            if not may_fork or self._dispatcher.target == 0:
                return
            self._pool.start_zygote()
        for command in self._dispatcher.plan():
            match command:
                case plans.Send(loader=loader, batch=batch):
                    self._pool.send(loader, batch, self._key)
                case plans.Start(loader=loader, of=count):
                    try:
                        self._pool.start(loader, count)
                    except OSError:  # the zygote has died: `events` will say so
                        self._dispatcher.start_failed(loader)
                case plans.Stop(loader=loader):
                    self._pool.stop(loader)
        if self._dispatcher.needs_no_loaders:
            self._pool.release()

    def _load(self, batch: Batch) -> Any:
        """Load a batch in this process. The random numbers of the training loop stay as they are."""
        with undisturbed() if self._recipe.seeding == "sample" else nullcontext():
            result, times = self._recipe.load(batch.indices, batch.position, self._key)
        self._meter.loaded(times, 0.0, 0)
        return result

    def _measure(self, began: float, ready: int) -> None:
        used = 0.0 if self._yielded_at is None else began - self._yielded_at
        self._yielded_at = now = clock()
        self._meter.yielded(used, now - began, ready)

    def _count(self, batch: Batch) -> None:
        self.position.count(batch, batch_samples(batch.indices, self._recipe.auto_collation))
        note = self._note()
        if note is not None:
            note(self.position)


def pin_device(wanted: bool, named: str) -> str | None:
    """The device for whose sake batches are pinned, with the warnings of torch's DataLoader."""
    if not wanted:
        return None
    if named:
        warnings.warn(
            "pin_memory_device is deprecated, the current accelerator will be used as the device,"
            f"ignore pin_memory_device='{named}'.",
            stacklevel=3,
        )
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if accelerator is None:
        warnings.warn(
            "'pin_memory' argument is set as true but no accelerator is found, "
            "then device pinned memory won't be used.",
            stacklevel=3,
        )
        return None
    if accelerator.type == "mps":
        warnings.warn(
            "'pin_memory' argument is set as true but not supported on MPS now, device pinned memory won't be used.",
            stacklevel=3,
        )
        return None
    return str(accelerator.type)
