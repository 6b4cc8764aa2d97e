"""Hooks for the moments of a process that concern its threadlets: exit, uncaught exceptions, forks.

They are installed at the first attach(). The hook for uncaught exceptions calls the previous one, and is removed with
the last threadlet.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
from types import TracebackType
from typing import Protocol

from torchloom.protocol.ids import RankId
from torchloom.threadlet.connection.event_loop import after_fork, before_fork
from torchloom.threadlet.process.exit_reason import Ending, ending_of


class Hooked(Protocol):
    def end(self, ending: Ending) -> None: ...
    def disown(self) -> None: ...


live: dict[RankId, Hooked] = {}
"""The threadlets of this process that have not said goodbye."""
inherited: set[RankId] = set()
"""In a forked child: the ranks of its parent."""
_hooked = False
_previous = sys.excepthook


def register(rank: RankId, threadlet: Hooked) -> None:
    global _hooked, _previous  # noqa: PLW0603  a process has one of each hook
    live[rank] = threadlet
    if not _hooked:
        _hooked = True
        atexit.register(_end_all, Ending())
        os.register_at_fork(before=before_fork, after_in_parent=after_fork, after_in_child=_in_child)
    if sys.excepthook is not _on_uncaught:
        _previous = sys.excepthook
        sys.excepthook = _on_uncaught


def unregister(rank: RankId) -> None:
    live.pop(rank, None)
    if not live and sys.excepthook is _on_uncaught:
        sys.excepthook = _previous


def _end_all(ending: Ending) -> None:
    for threadlet in list(live.values()):
        with contextlib.suppress(BaseException):  # nothing may change how a process exits, not even a second Ctrl-C
            threadlet.end(ending)


def _on_uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    try:
        _previous(kind, error, trace)  # first, so that the traceback does not wait for the goodbye
    finally:
        if not hasattr(sys, "ps1") and not sys.flags.interactive:  # interactively an error does not end the process
            _end_all(ending_of(error))


def _in_child() -> None:
    after_fork()
    inherited.update(live)
    for threadlet in live.values():
        with contextlib.suppress(Exception):  # a child must start, whatever state its parent was in
            threadlet.disown()
    live.clear()
    if sys.excepthook is _on_uncaught:
        sys.excepthook = _previous
