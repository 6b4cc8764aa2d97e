"""Connects the threadlet and the checkpoints of a process, whichever of the two is made first.

The threadlet offers `loom checkpoint` and the checkpoint interval as a knob, and reports to the weaver what was saved.
The checkpoints save the values of the threadlet's knobs. Each works without the other: training without a control plane
is saved too.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

from torchloom.protocol.rank import Resumed, Saved, SaveFailed, Value

CheckpointNews = Saved | SaveFailed | Resumed


class ThreadletPort(Protocol):
    """What checkpoints need from a threadlet."""

    job: str

    @property
    def incarnation(self) -> str: ...
    def keep(self, checkpoints: CheckpointPort) -> None:
        """Offer these checkpoints to operators."""

    def tell(self, news: CheckpointNews) -> None:
        """Report to the weaver. Never blocks, never raises."""

    def values(self) -> dict[str, Value]:
        """The current value of each knob."""

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Mark what is done inside as something other than training."""

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


class CheckpointPort(Protocol):
    """What a threadlet needs from checkpoints."""

    every: int | None
    """Steps between two checkpoints; None if the script decides."""

    def wanted(self, step: int) -> str:
        """Save at this step boundary, because an operator asked for it on all ranks; returns the path."""

    def wait(self, seconds: float | None = None) -> bool:
        """Wait until nothing is being written; False if that takes longer than this."""


_threadlets: list[ThreadletPort] = []
_checkpoints: weakref.WeakSet[CheckpointPort] = weakref.WeakSet()


def register_threadlet(threadlet: ThreadletPort) -> None:
    _threadlets.append(threadlet)
    for checkpoints in list(_checkpoints):
        threadlet.keep(checkpoints)


def unregister_threadlet(threadlet: ThreadletPort) -> None:
    """At its goodbye, or in a forked child, which is not the rank."""
    if threadlet in _threadlets:
        _threadlets.remove(threadlet)


def register_checkpoints(checkpoints: CheckpointPort) -> None:
    _checkpoints.add(checkpoints)
    for threadlet in list(_threadlets):
        threadlet.keep(checkpoints)


def current_threadlet() -> ThreadletPort | None:
    """The threadlet of this process, if there is one; the first, where a process plays several ranks."""
    return _threadlets[0] if _threadlets else None


def current_job() -> str:
    """The name of the job; empty without a threadlet."""
    return _threadlets[0].job if _threadlets else ""


def checkpoint_phase() -> AbstractContextManager[None]:
    """Mark what is done inside as checkpointing: training stands still."""
    threadlet = current_threadlet()
    return nullcontext() if threadlet is None else threadlet.phase("checkpoint")


def wait_for_checkpoints(seconds: float) -> None:
    """Before a goodbye: wait until nothing is being written, at most this long for each folder."""
    for checkpoints in list(_checkpoints):
        checkpoints.wait(seconds)
