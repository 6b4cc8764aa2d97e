"""Where a process's threadlet and its checkpoints find each other, whichever of the two came first.

The threadlet offers `loom checkpoint` and the interval as a knob, and tells the weaver what was saved; the checkpoints
keep its values. Neither needs the other: training without a control plane is saved too.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

from torchloom.messages import Resumed, Saved, SaveFailed, Value


class Side(Protocol):
    """What checkpoints ask of a threadlet."""

    job: str
    rank: int

    @property
    def incarnation(self) -> str: ...
    def keep(self, kept: Kept) -> None:
        """Offer these checkpoints to the operator."""

    def tell(self, news: Saved | SaveFailed | Resumed) -> None:
        """Let the weaver know; never waits, never raises."""

    def values(self) -> dict[str, Value]:
        """Knobs as they are now."""

    def phase(self, name: str) -> AbstractContextManager[None]:
        """What is done inside is not training."""

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


class Kept(Protocol):
    """What a threadlet asks of checkpoints."""

    every: int | None
    """Steps between two; None if the script decides."""

    def wanted(self, step: int) -> str:
        """An operator wants one, on all ranks at this step boundary; where it will be."""

    def wait(self, seconds: float | None = None) -> bool:
        """Let what is being written be finished; whether it was, in that time."""


_sides: list[Side] = []
_kept: weakref.WeakSet[Kept] = weakref.WeakSet()


def came(side: Side) -> None:
    """A threadlet is attached."""
    _sides.append(side)
    for kept in list(_kept):
        side.keep(kept)


def left(side: Side) -> None:
    """It says goodbye, or this is a forked child to which it does not belong."""
    if side in _sides:
        _sides.remove(side)


def keep(kept: Kept) -> None:
    """Checkpoints are made in this process."""
    _kept.add(kept)
    for side in list(_sides):
        side.keep(kept)


def side() -> Side | None:
    """The threadlet of this process, if there is one. The first, where a process plays several ranks."""
    return _sides[0] if _sides else None


def stalling() -> AbstractContextManager[None]:
    """Training stands still in here, for a checkpoint."""
    threadlet = side()
    return nullcontext() if threadlet is None else threadlet.phase("checkpoint")


def finish(seconds: float) -> None:
    """Before a goodbye: what is being written is finished, if that does not take longer than this."""
    for kept in list(_kept):
        kept.wait(seconds)
