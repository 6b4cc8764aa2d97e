"""What an iteration needs from its loaders, which are processes or threads, and what they report."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from torchloom.data.stage_times import StageTimes


class Exit(NamedTuple):
    """How a loader process ended."""

    pid: int
    """0 if it could not be forked."""
    status: int
    """The exit code, or the negative number of a signal; an errno if it could not be forked."""


@dataclass(frozen=True, slots=True)
class Arrived:
    loader: int
    epoch: int
    number: int
    result: Any
    times: StageTimes
    received: float
    """Seconds that receiving it took here."""
    size: int
    """Bytes that were sent; 0 from a thread, which sends nothing."""


@dataclass(frozen=True, slots=True)
class Died:
    loader: int
    exit: Exit | None
    """None if nobody knows: the zygote died before it could report it."""


@dataclass(frozen=True, slots=True)
class ZygoteDied:
    status: int | None
    """Its exit code, or the negative number of a signal."""


Event = Arrived | Died | ZygoteDied


class Pool(Protocol):
    """The loaders of one ElasticLoader. The caller holds `lock`, except in `wait` and `inspect`."""

    lock: threading.RLock
    epoch: int
    """The iteration to which new batches belong; what arrives of an earlier one is dropped."""
    is_broken: bool
    """No loader can be started any more, or an interrupt came between two steps that belong together."""

    @property
    def is_open(self) -> bool:
        """Whether loaders can be started."""

    @property
    def is_closed(self) -> bool:
        """It cannot be opened again."""

    @property
    def loaders(self) -> list[int]: ...

    def open(self) -> None:
        """Only the thread that iterates calls this."""

    def start(self, loader: int, count: int) -> None:
        """`count`: loaders that are wanted now. OSError if the pool is not open any more; LoaderShortage."""

    def send(self, loader: int, number: int, content: tuple[Any, ...]) -> None:
        """Let a loader load a batch, after those that it has. `content`: the arguments of `Recipe.load`."""

    def stop(self, loader: int) -> None:
        """Let a loader end. It has nothing to do any more."""

    def release(self) -> None:
        """Everything of this epoch was loaded."""

    def wait(self, seconds: float | None) -> bool:
        """Wait for an event, also of a loader that starts meanwhile. False after this time."""

    def events(self) -> Iterator[Event]:
        """What has happened; it does not wait. LoaderShortage if something is to be tried again by the next call."""

    def inspect(self, loader: int) -> tuple[int, str]:
        """The process id of a loader and its stack, as far as they can be found out. This may take a moment."""

    def close(self) -> object:
        """End all loaders and wait for them, for a time. It is also called when the pool has gone."""
