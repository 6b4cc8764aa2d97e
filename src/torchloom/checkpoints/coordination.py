"""How the ranks of one checkpoint agree: all ranks of torch.distributed, or a single process.

The first rank decides, and all ranks get the same answer or the same error. Only save() and resume() communicate; the
writing threads never do, so they cannot interfere with the training's collectives.
"""

from __future__ import annotations

import contextlib
import secrets
import zlib
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

from torchloom.errors import BadInput, BadState, TorchLoomError

Answer = TypeVar("Answer")
TALK_SECONDS = 600.0
"""Longest wait for a rank to take part in a save; then the save fails and training continues."""


class Coordinator:
    """Of a single process."""

    rank = 0
    size = 1
    world: Any = None
    """The process group of the training."""
    group: Any = None
    """The process group of its own."""

    def next_id(self) -> str:
        """An id that is the same on all ranks and never used again."""
        return secrets.token_hex(4)

    def broadcast_from_zero(self, work: Callable[[], Answer]) -> Answer:
        """Run `work` on the first rank; returns its result on all ranks, or raises its error."""
        return work()

    def gather(self, mine: Any) -> list[Any]:
        """The values of all ranks, on every rank."""
        return [mine]

    def scatter(self, work: Callable[[], Any], share: Callable[[list[Any]], list[Any]]) -> Any:
        """Run `work` on all ranks; the first computes a share for each from the results. Returns this rank's share.

        If one rank fails, all raise.
        """
        return share([work()])[0]


class GlooCoordinator(Coordinator):
    """Of all ranks. Uses a gloo group of its own, separate from the training's collectives."""

    def __init__(self) -> None:
        self.world = dist.group.WORLD
        self.rank = dist.get_rank()
        self.size = dist.get_world_size()
        self.group = dist.new_group(backend="gloo", timeout=timedelta(seconds=TALK_SECONDS))
        self._token = self.broadcast_from_zero(lambda: secrets.token_hex(16))
        self._count = 0

    def next_id(self) -> str:
        self._count += 1
        return f"{zlib.crc32(f'{self._token} {self._count}'.encode()):08x}"

    def broadcast_from_zero(self, work: Callable[[], Answer]) -> Answer:
        # Not with scatter(): the description of a large checkpoint would be copied once for each rank.
        outcome: list[Any] = [_attempt(work) if self.rank == 0 else None]
        dist.broadcast_object_list(outcome, src=0, group=self.group)
        answer: Answer = _unpack(outcome[0])
        return answer

    def gather(self, mine: Any) -> list[Any]:
        values = [None] * self.size
        dist.all_gather_object(values, mine, group=self.group)
        return values

    def scatter(self, work: Callable[[], Any], share: Callable[[list[Any]], list[Any]]) -> Any:
        result, problem = None, None
        try:
            result = work()
        except Exception as error:  # noqa: BLE001  raised once the others know
            problem = error
        reports: list[Any] | None = [None] * self.size if self.rank == 0 else None
        dist.gather_object((_as_sendable(problem), result), reports, dst=0, group=self.group)
        shares: list[Any] = [None] * self.size
        if reports is not None:
            parts = _attempt(lambda: share(_results(reports)))
            shares = [parts] * self.size if isinstance(parts, TorchLoomError) else parts
        own: list[Any] = [None]
        dist.scatter_object_list(own, shares, src=0, group=self.group)
        if problem is not None:
            raise problem
        return _unpack(own[0])


def _results(reports: list[tuple[_Failure, Any]]) -> list[Any]:
    _raise_first(failure for failure, _ in reports)
    return [result for _, result in reports]


def _attempt(work: Callable[[], Any]) -> Any:
    """What it returns, or a TorchLoomError, which can be sent to every rank and raised there."""
    try:
        return work()
    except TorchLoomError as error:
        return error
    except Exception as error:  # noqa: BLE001  raised on every rank
        return TorchLoomError(f"{type(error).__name__}: {error}")


def _unpack(outcome: Any) -> Any:
    if isinstance(outcome, TorchLoomError):
        raise outcome
    return outcome


def update_coordinator(current: Coordinator) -> Coordinator:
    """A coordinator of all ranks as soon as torch.distributed is initialised, else the current one.

    Every rank must call it at the same point.
    """
    if not dist.is_available() or not dist.is_initialized() or current.world is dist.group.WORLD:
        return current
    return GlooCoordinator()


@contextlib.contextmanager
def all_or_none(coordinator: Coordinator) -> Iterator[None]:
    """The block succeeds on all ranks, or raises on all ranks."""
    problem: Exception | None = None
    try:
        yield
    except Exception as error:  # noqa: BLE001  raised once the others know
        problem = error
    failures = coordinator.gather(_as_sendable(problem))
    if problem is not None:
        raise problem
    _raise_first(failures)


_Failure = tuple[type[TorchLoomError], str] | None


def _as_sendable(problem: Exception | None) -> _Failure:
    """An error as it is sent to the other ranks."""
    if problem is None:
        return None
    kind = BadInput if isinstance(problem, BadInput) else BadState
    return kind, str(getattr(problem, "message", "") or repr(problem))[:500]


def _raise_first(failures: Iterable[_Failure]) -> None:
    for rank, failure in enumerate(failures):
        if failure is not None:
            kind, why = failure
            raise kind(f"rank {rank}: {why}")
