"""One poll over descriptors, which signals interrupt: the only place where a supervisor waits."""

from __future__ import annotations

import contextlib
import os
import select
import signal
from collections.abc import Callable


class PollLoop:
    def __init__(self) -> None:
        self._poll = select.poll()
        self._ready: dict[int, Callable[[], None]] = {}
        self._wake: tuple[int, int] | None = None

    def watch(self, fd: int, ready: Callable[[], None]) -> None:
        self._ready[fd] = ready
        self._poll.register(fd, select.POLLIN)

    def change(self, fd: int, events: int) -> None:
        self._poll.modify(fd, events)

    def unwatch(self, fd: int) -> None:
        del self._ready[fd]
        self._poll.unregister(fd)

    def hear_signals(self, woken: Callable[[], None]) -> None:
        """Any signal that has a handler ends the waiting; `woken` is called after the handler."""
        self._wake = reading, writing = os.pipe()
        for fd in self._wake:
            os.set_blocking(fd, False)
        signal.set_wakeup_fd(writing, warn_on_full_buffer=False)

        def drain() -> None:
            with contextlib.suppress(BlockingIOError):
                os.read(reading, 65536)
            woken()

        self.watch(reading, drain)

    def turn(self, wait: bool) -> None:
        for fd, _ in self._poll.poll(None if wait else 0):
            if ready := self._ready.get(fd):  # one that came before it may have closed this one
                ready()

    def close_in_child(self) -> None:
        """A fork inherits these, and a process that waits for their end would wait for the fork's."""
        signal.set_wakeup_fd(-1)
        for fd in self._wake or ():
            os.close(fd)
