"""The moments of a process a threadlet must hear of: its end, an error nobody caught, a fork.

Hooked in once, at the first attach(). The hook for uncaught errors calls the one it found, and leaves when the last
threadlet has.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
from types import TracebackType
from typing import Protocol

from torchloom.messages import RankId
from torchloom.threadlet.ending import Ending, ending_of
from torchloom.threadlet.loop import after_fork, before_fork


class Hooked(Protocol):
    def end(self, ending: Ending) -> None: ...
    def disown(self) -> None: ...


live: dict[RankId, Hooked] = {}
"""The threadlets of this process that have not said goodbye."""
inherited: set[RankId] = set()
"""In a forked child: the ranks its parent speaks for."""
_hooked = False
_previous = sys.excepthook


def enter(rank: RankId, threadlet: Hooked) -> None:
    global _hooked, _previous  # noqa: PLW0603  a process has one of each hook
    live[rank] = threadlet
    if not _hooked:
        _hooked = True
        atexit.register(_at_exit)
        os.register_at_fork(before=before_fork, after_in_parent=after_fork, after_in_child=_in_child)
    if sys.excepthook is not _on_uncaught:
        _previous = sys.excepthook
        sys.excepthook = _on_uncaught


def leave(rank: RankId) -> None:
    live.pop(rank, None)
    if not live and sys.excepthook is _on_uncaught:
        sys.excepthook = _previous


def _end_all(ending: Ending) -> None:
    for threadlet in list(live.values()):
        with contextlib.suppress(BaseException):  # nothing may change how a process exits, not even a second Ctrl-C
            threadlet.end(ending)


def _at_exit() -> None:
    _end_all(Ending())


def _on_uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    hook = _previous
    try:
        hook(kind, error, trace)  # first: the traceback must not wait for a goodbye
    finally:
        if not hasattr(sys, "ps1") and not sys.flags.interactive:  # there an error ends a line, not the process
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
