"""The iterator over one epoch: it carries out what the dispatcher plans, and yields what it returns."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from torch._utils import ExceptionWrapper
from torch.utils.data._utils import pin_memory

from torchloom.data import loading_plan as plans
from torchloom.data.batch_cutter import BatchCutter
from torchloom.data.dispatcher import IDLE_DEATHS, Dispatcher
from torchloom.data.loaders.loader_notices import notice_of_zygote, notices_of_death, warn_caller
from torchloom.data.loaders.pool import Arrived, Died, Pool, ZygoteDied
from torchloom.data.loading_plan import Batch
from torchloom.data.position import EpochPosition, batch_samples
from torchloom.data.recipe import Recipe
from torchloom.data.seeding import epoch_key, undisturbed
from torchloom.data.shards import NoBatch, ShardHost
from torchloom.data.stage_times import LoadingMeter, clock, shortened
from torchloom.errors import LoaderDied, LoaderInterrupted, LoaderShortage, LoaderTimeout
from torchloom.protocol.data_loading import LoaderTrouble


class EpochIterator(Iterator[Any]):
    """Yields the batches of an epoch. Its loaders and its batch size can be changed at any moment, from any thread.

    What is requested while this object is at work, by another thread, a sampler or a signal handler, is stored and
    carried out when that work is done: nobody waits for a lock.
    """

    def __init__(
        self,
        pool: Pool,
        dispatcher: Dispatcher,
        recipe: Recipe,
        position: EpochPosition,
        *,
        cutter: BatchCutter | None,
        length: int | None,
        timeout: float,
        pin_device: str | None,
        keep_pool: bool,
        note: Callable[[], Callable[[EpochPosition], Warning | None] | None],
        meter: LoadingMeter,
    ) -> None:
        """Call `begin` next."""
        self.position = position
        self._process = os.getpid()
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
        self._waits_since: float | None = None
        self._hang: tuple[float, LoaderTrouble] | None = None
        """Of the wait that began at this time."""
        self._host: ShardHost | None = None
        """Of the shards that the training process loads itself."""
        self._key = epoch_key(position.base_seed, position.epoch)
        self._wanted_loaders = dispatcher.target
        self._wanted_size = cutter.size if cutter is not None else 0
        self._is_at_work = False
        self._epoch = -1
        self.is_cut = bool(position.segments)
        """The batch size, or the number of ranks, was changed in this epoch."""
        self._is_torn = False
        """An exception of a signal handler, such as KeyboardInterrupt, came between two steps that belong together."""
        self._is_planning = False
        """The same, in what is done for `resize` and `change_batch_size` in any thread, under the lock."""
        self._shortage: LoaderShortage | None = None
        self._notices: list[Warning] = []
        """Warnings for the next moment when one may become an exception: no batch is on its way then."""

    def begin(self) -> None:
        """Start the first loaders."""
        with self._pool.lock:
            self._pool.epoch += 1
            self._epoch = self._pool.epoch
            for loader in self._pool.loaders:
                self._dispatcher.adopt(loader)
            with self._at_work():
                self._open_pool()
                self._carry_out()
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
                        self._cut(self._cutter)
                    self._carry_out()
            finally:
                self._pool.lock.release()

    def _cut(self, cutter: BatchCutter) -> None:
        self._is_planning = True
        self.is_cut = True
        unused = self._dispatcher.discard()
        self._meter.recut += len(unused)
        cutter.cut_again(self._wanted_size, unused)
        self._is_planning = False

    @contextmanager
    def _at_work(self) -> Iterator[None]:
        """The caller holds the lock of the pool."""
        self._is_at_work = True
        try:
            yield
        finally:
            self._is_at_work = False

    def _has_requests(self) -> bool:
        if self._pool.epoch != self._epoch or self._pool.is_closed:
            return False
        return self._wanted_loaders != self._dispatcher.target or self._is_to_be_cut()

    def _is_to_be_cut(self) -> bool:
        return self._cutter is not None and self._wanted_size != self._cutter.size and not self.position.is_over

    @property
    def loaders(self) -> int:
        """Loaders now, including those that finish their last batches."""
        return len(self._pool.loaders)

    def close(self) -> None:
        """End the iteration, and its loaders unless they are persistent."""
        with self._pool.lock:
            self.position.is_over = True
            self._host = None
            if not self._keep_pool:
                self._pool.close()

    def __next__(self) -> Any:
        result = self._next_result()
        if result.__class__ is ExceptionWrapper:  # isinstance() would let signal handlers run, and this batch be lost
            del self  # the exception is in a reference cycle with this frame, and must not keep the loaders alive
            result.reraise()
        return result

    def _next_result(self) -> Any:
        began = clock()
        position = self.position
        progress = position.progress()
        try:
            result = self._find_result(began)
            if self._pin_device is not None and not isinstance(result, ExceptionWrapper):
                result = self._pin(result)
            self._is_torn = False
            return result
        except BaseException:
            if self._is_torn or self._is_planning:  # a batch may be neither here nor there
                position.go_back(progress)
                self._pool.is_broken = True
            raise

    def _pin(self, result: Any) -> Any:
        try:
            return pin_memory.pin_memory(result, self._pin_device)
        except Exception:  # of the user's type, in place of this batch
            self._is_torn = False
            raise

    def _find_result(self, began: float) -> Any:
        """`_is_torn` remains set until the result is certain to be returned."""
        if self._process != os.getpid():
            raise RuntimeError("this iteration belongs to another process: begin one with iter(loader)")
        while True:
            with self._pool.lock:
                if self.position.is_over:
                    raise StopIteration
                if self._pool.epoch != self._epoch:
                    raise RuntimeError("a later iteration of this loader with persistent_workers has begun")
                if self._pool.is_closed:
                    raise RuntimeError("this iteration has ended: the loader has loaded a state since")
                if self._is_torn or self._is_planning:
                    raise LoaderInterrupted
                with self._at_work():
                    outcome = self._advance()
            self._apply_requests()
            match outcome:
                case plans.Yield(batch=batch, result=result):
                    result = self._count(batch, result)
                    self._measure(began, self._dispatcher.ready)
                    return result
                case plans.LoadHere(batch=batch):
                    result = self._load(batch)
                    if result is not NoBatch:
                        self._measure(began, 0)
                        return result
                    with self._pool.lock:
                        self._dispatcher.end_group(batch, exists=False)
                    self._is_torn = False
                case plans.KilledLoaders(batch=batch):
                    self._count(batch)
                    self._is_torn = False
                    raise LoaderDied(batch.number, batch.indices, batch.kills, self.position.describe(batch))
                case plans.LoadersKeepDying():
                    self._is_torn = False
                    raise LoaderDied(None, None, IDLE_DEATHS)
                case plans.SamplerFailed(error=error):
                    self._is_torn = False
                    raise error
                case plans.End():
                    self.close()
                    self._is_torn = False
                    raise StopIteration
                case plans.Wait():
                    self._is_torn = False
                    self._wait()

    def _wait(self) -> None:
        if self._shortage is not None and not self._pool.loaders:
            raise self._shortage
        self._waits_since = clock()
        try:
            if not self._pool.wait(self._timeout or None):
                raise self._late()
        finally:
            self._waits_since = None

    def _late(self) -> LoaderTimeout:
        with self._pool.lock:
            awaited = self._dispatcher.awaited()
        if awaited is None:
            return LoaderTimeout(self._timeout)
        loader, batch = awaited
        return LoaderTimeout(self._timeout, loader, shortened(batch.indices))

    def _advance(self) -> plans.Outcome:
        """The next outcome. The caller resets `_is_torn` when nothing can be lost any more."""
        self._read()
        self._warn()
        self._open_pool()
        self._is_torn = True
        outcome = self._dispatcher.take()
        self._carry_out()
        return self._dispatcher.take() if isinstance(outcome, plans.Wait) else outcome

    def _warn(self) -> None:
        while self._notices:
            warn_caller(self._notices.pop(0))

    def _read(self) -> None:
        self._is_torn = True
        try:
            for event in self._pool.events():
                match event:
                    case Arrived() if event.result is NoBatch:
                        self._dispatcher.group_ended(event.loader, event.number)
                    case Arrived():
                        self._dispatcher.arrived(event.loader, event.number, event.result)
                        self._meter.loaded(event.times, event.received, event.size)
                    case Died():
                        suspect = self._dispatcher.died(event.loader)
                        pid, status = (event.exit.pid, event.exit.status) if event.exit is not None else (0, None)
                        indices = "" if suspect is None else shortened(suspect.indices)
                        self._meter.died(event.loader, pid, status, indices)
                        self._notices += notices_of_death(event, self._meter.deaths)
                    case ZygoteDied():
                        self._lose_zygote(event)
        except LoaderShortage:
            self._is_torn = False
            raise
        self._is_torn = False

    def _lose_zygote(self, event: ZygoteDied) -> None:
        if self._pool.is_broken:
            self._dispatcher.cannot_start()
        self._notices.append(notice_of_zygote(event, self._pool.is_broken))

    def _open_pool(self) -> None:
        """Only in the thread that iterates."""
        if self._pool.is_open or self._pool.is_broken or self._dispatcher.needs_no_loaders:
            return
        if self._dispatcher.wants_loaders:
            self._pool.open()

    def _carry_out(self) -> None:
        if not self._pool.is_open and not (self._pool.is_broken and self._pool.loaders):
            return
        self._is_planning = True
        self._shortage = None
        for command in self._dispatcher.plan():
            match command:
                case plans.Send(loader=loader, batch=batch):
                    indices = self.position.request(batch) if command.is_new_host else batch.indices
                    self._pool.send(loader, batch.number, (indices, batch.position, self._key))
                case plans.Start(loader=loader, of=count):
                    try:
                        self._pool.start(loader, count)
                    except LoaderShortage as error:
                        self._shortage = error
                        self._dispatcher.start_failed(loader)
                    except OSError:  # the pool is not open any more: `events` will say so
                        self._dispatcher.start_failed(loader)
                case plans.Stop(loader=loader):
                    self._pool.stop(loader)
        if self._dispatcher.needs_no_loaders:
            self._pool.release()
        self._is_planning = False

    def _load(self, batch: Batch) -> Any:
        """Load a batch in this process, or NoBatch. The random numbers of the training loop stay as they are."""
        if self._host is None:
            self._host = self._recipe.host(in_training=True)
        indices = self.position.request(batch)
        try:
            with undisturbed() if self._recipe.seeding == "sample" else nullcontext():
                result, times = self._recipe.load(indices, batch.position, self._key, self._host)
        except Exception:  # of the dataset, in place of this batch
            self._count(batch)
            self._is_torn = False
            raise
        if result is NoBatch:
            return result
        self._meter.loaded(times, 0.0, 0)
        return self._count(batch, result)

    @property
    def draining(self) -> int:
        """Loaders that end after the batches that they have. Called by another thread."""
        return self._dispatcher.draining

    def waited(self) -> float:
        """Seconds that training has been waiting for a batch now. Called by another thread."""
        since = self._waits_since
        return 0.0 if since is None else clock() - since

    def find_hang(self, seconds: float) -> LoaderTrouble | None:
        """The loader for which training has been waiting for longer than this. Called by another thread."""
        since = self._waits_since
        if since is None or clock() - since < seconds or not self._pool.lock.acquire(blocking=False):
            return None
        try:
            awaited = self._dispatcher.awaited()
        finally:
            self._pool.lock.release()
        self._apply_requests()  # of those who found the lock taken
        if awaited is None:
            return None
        loader, batch = awaited
        if self._hang is None or self._hang[0] != since:  # its stack is read once
            pid, stack = self._pool.inspect(loader)
            seconds, indices = clock() - since, shortened(batch.indices)
            trouble = LoaderTrouble(what="hung", loader=loader, pid=pid, seconds=seconds, indices=indices, stack=stack)
            self._hang = since, trouble
        return self._hang[1]

    def _measure(self, began: float, ready: int) -> None:
        used = 0.0 if self._yielded_at is None else began - self._yielded_at
        self._yielded_at = now = clock()
        self._meter.yielded(used, now - began, ready)

    def _count(self, batch: Batch, result: Any = None) -> Any:
        """A batch is yielded, or an exception in its place. Returns what training receives."""
        samples = batch_samples(batch.indices, self._recipe.auto_collation)
        result = self.position.count(batch, samples, result)
        note = self._note()
        if note is not None and (notice := note(self.position)) is not None:
            self._notices.append(notice)
        return result
