"""The loader threads of one ElasticLoader: threads of the training process that load and collate batches.

They share the dataset and the memory of the training process, so nothing is pickled, sent or mapped. They help if
loading releases the GIL, or if there is none. The generators of the process belong to the training loop: threads
neither seed nor restore them.

A thread has no reference to the pool, so that the end of the pool ends its threads.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
import traceback
import weakref
from collections import deque
from collections.abc import Iterator
from queue import Empty, SimpleQueue
from typing import Any

from torch._utils import ExceptionWrapper

from torchloom.data.loaders.pool import Arrived, Died
from torchloom.data.recipe import Recipe, Unwanted
from torchloom.data.stage_times import NO_TIMES
from torchloom.errors import LoaderShortage

GRACE_SECONDS = 5.0
"""Time for the threads to finish their batches when an iteration ends."""
MOST_CHARACTERS = 8000
"""Of a stack."""


class _Arrivals:
    """Batches that threads have loaded, in the order in which they were.

    Waiting takes a token and not a batch: an interrupt that comes as soon as there is one loses nothing.
    """

    def __init__(self) -> None:
        self._batches: deque[Arrived | Died] = deque()
        self._tokens: SimpleQueue[None] = SimpleQueue()

    def put(self, batch: Arrived | Died) -> None:
        self._batches.append(batch)
        self.wake()

    def wake(self) -> None:
        self._tokens.put(None)

    def wait(self, seconds: float | None) -> bool:
        """True also if only a token is left: then there is nothing to take, and the caller waits again."""
        if not self._batches:
            try:
                self._tokens.get(timeout=seconds)
            except Empty:
                return False
        return True

    def take(self) -> Iterator[Arrived | Died]:
        with contextlib.suppress(Empty):
            while True:
                self._tokens.get_nowait()
        while self._batches:
            yield self._batches.popleft()


class _LoaderThread(threading.Thread):
    def __init__(self, loader: int, recipe: Recipe, arrivals: _Arrivals) -> None:
        super().__init__(name=f"loom-loader-{loader}", daemon=True)
        self.inbox: SimpleQueue[tuple[Recipe, int, int, tuple[Any, ...]] | None] = SimpleQueue()
        """Recipe, epoch, number and content of batches; None after the last."""
        self.is_closed = False
        """The batches in the inbox, and the one that is being loaded, are not wanted any more."""
        self._loader = loader
        self._init = recipe.worker_init_fn
        """Until it was called: a thread that waits keeps nothing of the user's alive."""
        self._arrivals = arrivals

    def run(self) -> None:
        try:
            failure = self._initialize()
            while self._work(failure):
                pass
        except BaseException:
            self._arrivals.put(Died(self._loader, None))
            raise

    def _initialize(self) -> ExceptionWrapper | None:
        init, self._init = self._init, None
        try:
            if init is not None:
                init(self._loader)
        except BaseException:  # noqa: BLE001  # the user's: raised in training, for each batch
            return self._wrapped()
        return None

    def _work(self, failure: ExceptionWrapper | None) -> bool:
        """One batch; False after the last."""
        job = self.inbox.get()
        if job is None or self.is_closed:
            return False
        recipe, epoch, number, (indices, position, key) = job
        result: Any = failure
        times = NO_TIMES
        try:
            if failure is None:
                result, times = recipe.load(indices, position, key, is_unwanted=self._is_unwanted)
        except Unwanted:
            return False
        except BaseException:  # noqa: BLE001  # the user's, also SystemExit: raised in training
            result, times = self._wrapped(), NO_TIMES
        self._arrivals.put(Arrived(self._loader, epoch, number, result, times, 0.0, 0))
        return True

    def _is_unwanted(self) -> bool:
        return self.is_closed

    def _wrapped(self) -> ExceptionWrapper:
        return ExceptionWrapper(where=f"in DataLoader worker thread {self._loader}")


class _Threads:
    """What has to end. It is apart from the pool, so that it can end when the pool has gone."""

    def __init__(self, arrivals: _Arrivals) -> None:
        self.arrivals = arrivals
        self.running: dict[int, _LoaderThread] = {}
        self.stopped: list[_LoaderThread] = []

    def stop(self, loader: int) -> None:
        thread = self.running.get(loader)
        if thread is not None:
            thread.inbox.put(None)
            self.stopped = [*(each for each in self.stopped if each.is_alive()), thread]
            del self.running[loader]

    def close(self) -> None:
        self.shut_down()
        self.join()

    def shut_down(self) -> None:
        for thread in self.running.values():
            thread.is_closed = True
            thread.inbox.put(None)
        self.arrivals.wake()  # another thread than the one that iterates may have ended the iteration

    def join(self) -> None:
        deadline = time.monotonic() + GRACE_SECONDS
        for thread in [*self.running.values(), *self.stopped]:
            if thread.is_alive() and thread is not threading.current_thread():  # which may collect garbage
                thread.join(max(0.0, deadline - time.monotonic()))
        self.running.clear()
        self.stopped.clear()


class LoaderThreads:
    """A Pool of threads. They can be started by any thread, so there is nothing to open."""

    is_open = True

    def __init__(self, recipe: Recipe) -> None:
        self.lock = threading.RLock()
        self.epoch = 0
        self.is_broken = False
        self._recipe = recipe
        self._arrivals = _Arrivals()
        self._threads = _Threads(self._arrivals)
        self._last = weakref.finalize(self, self._threads.shut_down)
        """For a `close` that was interrupted."""
        self.close = weakref.finalize(self, self._threads.close)

    @property
    def is_closed(self) -> bool:
        return not self.close.alive

    @property
    def loaders(self) -> list[int]:
        return list(self._threads.running)

    def open(self) -> None: ...

    def start(self, loader: int, count: int) -> None:  # noqa: ARG002  # processes tell it to get_worker_info()
        thread = _LoaderThread(loader, self._recipe, self._arrivals)
        self._threads.running[loader] = thread  # before it starts: an interrupt must not leave it behind
        try:
            thread.start()
        except RuntimeError as error:
            del self._threads.running[loader]
            raise LoaderShortage(str(error)) from error

    def send(self, loader: int, number: int, content: tuple[Any, ...]) -> None:
        thread = self._threads.running.get(loader)
        if thread is not None:  # otherwise it could not be started
            thread.inbox.put((self._recipe, self.epoch, number, content))

    def stop(self, loader: int) -> None:
        self._threads.stop(loader)

    def release(self) -> None: ...

    def wait(self, seconds: float | None) -> bool:
        return self._arrivals.wait(seconds)

    def events(self) -> Iterator[Arrived | Died]:
        for event in self._arrivals.take():
            if isinstance(event, Died):
                self._threads.stop(event.loader)  # it reports its exception first, and is joined like the others
                yield event
            elif event.epoch == self.epoch:
                yield event

    def inspect(self, loader: int) -> tuple[int, str]:
        thread = self._threads.running.get(loader)
        frame = sys._current_frames().get(thread.ident or 0) if thread is not None else None
        return os.getpid(), "".join(traceback.format_stack(frame))[-MOST_CHARACTERS:] if frame is not None else ""
