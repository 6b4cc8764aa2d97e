"""Connects the threadlet and the training loader of a process, whichever of the two is made first. It needs no torch.

A loader is the training loader if the script names it (`loom.watch(loader)`), or once steps were finished between its
batches: a loader for validation never becomes it. The threadlet then offers `loaders` as a knob and reports what the
loader measures.
"""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections import deque
from typing import Any, Literal, Protocol

from torchloom.protocol.data_loading import DataPlace, Loading

logger = logging.getLogger("torchloom")
KEPT_PLACES = 4096
"""Batches of which a loader remembers at which step they were yielded: ranks are never further apart."""


class LoaderPort(Protocol):
    """What a threadlet needs from an ElasticLoader."""

    num_workers: int
    batch_size: int | None
    history: YieldHistory

    @property
    def most_loaders(self) -> int | None:
        """None without a limit."""

    @property
    def fixed_batch_size(self) -> str:
        """What fixes the batch size; empty if it can change."""

    def measure(self) -> Loading: ...
    def resize(self, count: int) -> None: ...
    def change_batch_size(self, size: int, at: Literal["batch", "epoch"] = "batch") -> None: ...
    def total(self) -> int:
        """Indices of an epoch; -1 if the sampler has no length."""


class ThreadletPort(Protocol):
    """What a loader needs from a threadlet."""

    @property
    def step_number(self) -> int: ...
    def use_loader(self, loader: Any) -> None:
        """This is the training loader."""


class YieldHistory:
    """At which step each of the latest batches was yielded. Written by the training thread, read by the link thread."""

    def __init__(self) -> None:
        self._places: deque[tuple[int, int, int]] = deque(maxlen=KEPT_PLACES)
        """Steps finished before the batch, epoch, indices used with it."""
        self._is_whole = True

    def add(self, step: int, epoch: int, yielded: int) -> bool:
        """Note a batch; whether steps were finished since the one before."""
        places = self._places
        self._is_whole = self._is_whole and len(places) < KEPT_PLACES
        news = bool(places) and places[-1][0] < step
        places.append((step, epoch, yielded))
        return news

    def place(self, finished: int, total: int) -> DataPlace | None:
        """How far the loader was when this number of steps was finished; None if that is forgotten."""
        for step, epoch, yielded in reversed(self._places.copy()):
            if step < finished:
                return DataPlace(epoch=epoch, yielded=yielded, total=total)
        return DataPlace(epoch=-1, yielded=0, total=total) if self._is_whole else None


_threadlets: list[ThreadletPort] = []
_training_loader: weakref.ref[Any] | None = None


def register_threadlet(threadlet: ThreadletPort) -> None:
    _threadlets.append(threadlet)
    if _training_loader is not None and (loader := _training_loader()) is not None:
        _offer(threadlet, loader)


def unregister_threadlet(threadlet: ThreadletPort) -> None:
    """At its goodbye, or in a forked child, which is not the rank."""
    if threadlet in _threadlets:
        _threadlets.remove(threadlet)


def measure() -> Loading | None:
    """What the training loader did since the last call. None without one. Never raises."""
    loader = _training_loader() if _training_loader is not None else None
    with contextlib.suppress(Exception):
        return loader.measure() if loader is not None else None
    return None


def note_batch(loader: LoaderPort, epoch: int, yielded: int) -> None:
    """A loader has yielded a batch. In the training thread, for each batch."""
    step = _threadlets[0].step_number if _threadlets else 0
    if loader.history.add(step, epoch, yielded):
        is_known = _training_loader is not None and _training_loader() is not None
        if not is_known:
            set_loader(loader)


def set_loader(loader: LoaderPort) -> None:
    """This loader feeds the training. Never raises: it is called between two batches."""
    global _training_loader  # noqa: PLW0603
    _training_loader = weakref.ref(loader)
    for threadlet in list(_threadlets):
        _offer(threadlet, loader)


def _offer(threadlet: ThreadletPort, loader: LoaderPort) -> None:
    try:
        threadlet.use_loader(loader)
    except Exception as error:  # noqa: BLE001  training continues
        logger.warning("torchLoom: the loaders cannot be changed from outside: %s", error)
