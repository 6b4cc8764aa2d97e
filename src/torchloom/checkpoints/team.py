"""The ranks that make one checkpoint together: alone, or all of torch.distributed's.

What has to be decided once is decided by the first rank, and everyone hears the same answer or the same error. Only
save() and resume() talk; the threads that write never do, so they cannot get into the way of training's collectives.
"""

from __future__ import annotations

import contextlib
import secrets
import zlib
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, Protocol, TypeVar

import torch.distributed as dist

from torchloom.errors import BadInput, BadState, TorchLoomError

Answer = TypeVar("Answer")
TALK_SECONDS = 600.0
"""A rank that does not come to a save for so long is not waited for any longer; the save fails, training goes on."""


class Team(Protocol):
    rank: int
    size: int

    def next_id(self) -> str:
        """The same on all ranks, never the same again, and of no other team."""

    def lead(self, work: Callable[[], Answer]) -> Answer:
        """The first rank does it; all have its answer, or its error."""

    def gather(self, mine: Any) -> list[Any]:
        """What each has, known to all."""

    def allot(self, mine: Any, share: Callable[[list[Any]], list[Any]]) -> Any:
        """The first rank hears what each has, and makes a share for each; mine."""


class Alone:
    rank = 0
    size = 1

    def next_id(self) -> str:
        return secrets.token_hex(4)

    def lead(self, work: Callable[[], Answer]) -> Answer:
        return work()

    def gather(self, mine: Any) -> list[Any]:
        return [mine]

    def allot(self, mine: Any, share: Callable[[list[Any]], list[Any]]) -> Any:
        return share([mine])[0]


class Ranks:
    """Over a gloo group of its own, so that nothing here meets a collective of the training."""

    def __init__(self) -> None:
        self.world = dist.group.WORLD
        self.rank = dist.get_rank()
        self.size = dist.get_world_size()
        self.group = dist.new_group(backend="gloo", timeout=timedelta(seconds=TALK_SECONDS))
        self._token = self.lead(lambda: secrets.token_hex(16))
        self._count = 0

    def next_id(self) -> str:
        self._count += 1
        return f"{zlib.crc32(f'{self._token} {self._count}'.encode()):08x}"

    def lead(self, work: Callable[[], Answer]) -> Answer:
        said: list[Any] = [None]
        if self.rank == 0:
            said = [_attempt(work)]
        dist.broadcast_object_list(said, src=0, group=self.group)
        answer: Answer = _unpack(said[0])
        return answer

    def gather(self, mine: Any) -> list[Any]:
        said = [None] * self.size
        dist.all_gather_object(said, mine, group=self.group)
        return said

    def allot(self, mine: Any, share: Callable[[list[Any]], list[Any]]) -> Any:
        heard: list[Any] | None = [None] * self.size if self.rank == 0 else None
        dist.gather_object(mine, heard, dst=0, group=self.group)
        shares: list[Any] = [None] * self.size
        if heard is not None:
            made = _attempt(lambda: share(heard))
            shares = [(True, part) for part in made[1]] if made[0] else [made] * self.size
        got: list[Any] = [None]
        dist.scatter_object_list(got, shares, src=0, group=self.group)
        return _unpack(got[0])


def is_distributed() -> bool:
    return bool(dist.is_available() and dist.is_initialized())


def find_team() -> Team:
    """All ranks, if torch.distributed has them. Every rank must come here at the same point."""
    return Ranks() if is_distributed() else Alone()


def _attempt(work: Callable[[], Any]) -> tuple[bool, Any]:
    try:
        return True, work()
    except TorchLoomError as error:
        return False, error
    except Exception as error:  # noqa: BLE001  told to everyone, and raised there
        return False, TorchLoomError(f"{type(error).__name__}: {error}")


def _unpack(said: tuple[bool, Any]) -> Any:
    went_well, answer = said
    if went_well:
        return answer
    assert isinstance(answer, Exception)
    raise answer


@contextlib.contextmanager
def together(team: Team) -> Iterator[None]:
    """What each rank does for itself goes well on all of them, or raises on all of them."""
    problem: Exception | None = None
    try:
        yield
    except Exception as error:  # noqa: BLE001  raised when the others know
        problem = error
    told = team.gather(None if problem is None else put(problem))
    if problem is not None:
        raise problem
    for rank, other in enumerate(told):
        if other is not None:
            kind, why = other
            raise kind(f"rank {rank}: {why}")


def put(problem: Exception) -> tuple[type[TorchLoomError], str]:
    """An error as the other ranks are told of it."""
    kind = BadInput if isinstance(problem, BadInput) else BadState
    return kind, str(getattr(problem, "message", "") or repr(problem))[:500]
