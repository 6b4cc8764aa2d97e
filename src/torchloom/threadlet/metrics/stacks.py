"""The stacks of a process: as a text for operators, and in a memfd that the agent reads.

On request the link thread has them written into that file, which is safe at any time. A signal does it too, and needs
no interpreter lock, so it works while C code holds the interpreter. The signal is a real-time one that this process
does not use; its handler restarts system calls, so training is not disturbed. A process has one such file, until it
ends.
"""

from __future__ import annotations

import contextlib
import faulthandler
import fcntl
import os
import signal
import sys
import threading
import traceback
from pathlib import Path

from torchloom.shared.liveness_page import STACKS, close_own

MAX_TEXT = 50_000
MOST = 4 * 1024 * 1024
"""Bytes kept; the reader empties the file."""
SPARED = 2
"""Real-time signals at the top that are left to others."""


class Stacks:
    def __init__(self, status: Path = Path("/proc/self/status")) -> None:
        self.fd = os.memfd_create(STACKS)
        self._inode = os.fstat(self.fd).st_ino
        self.signal = 0
        """The signal that makes the interpreter write them; 0 if there is none."""
        with contextlib.suppress(Exception):
            fcntl.fcntl(self.fd, fcntl.F_SETFL, fcntl.fcntl(self.fd, fcntl.F_GETFL) | os.O_APPEND)
        with contextlib.suppress(Exception):
            number = free_signal(status)
            if number:
                faulthandler.register(number, file=self.fd, all_threads=True, chain=False)
                self.signal = number

    def show(self) -> None:
        """Write the stack of every thread."""
        status = os.fstat(self.fd)
        if status.st_ino != self._inode:
            return  # the script has closed it, and the number belongs to another file
        if status.st_size > MOST:
            os.ftruncate(self.fd, 0)
        faulthandler.dump_traceback(file=self.fd, all_threads=True)

    def close(self) -> None:
        """In a forked child: the file is the parent's."""
        if self.signal:
            faulthandler.unregister(self.signal)
            self.signal = 0
        close_own(self.fd, self._inode)

    def check_signal(self) -> int:
        """The signal, as long as the script has not set a handler for it."""
        if self.signal and signal.getsignal(self.signal) not in {None, signal.SIG_DFL}:
            self.signal = 0
        return self.signal


def free_signal(status: Path) -> int:
    """A real-time signal that is not handled, ignored or blocked; 0 if there is none, or that cannot be known."""
    taken = 0
    for line in status.read_text().splitlines():
        if line.startswith(("SigCgt:", "SigIgn:", "SigBlk:")):
            taken |= int(line.split()[1], 16)
    for number in range(signal.SIGRTMAX - SPARED, signal.SIGRTMIN, -1):
        if signal.getsignal(number) is signal.SIG_DFL and not taken >> (number - 1) & 1:
            return number
    return 0


def format_stacks() -> str:
    """The stack of every thread of this process except torchLoom's own, the main thread first."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    main = threading.main_thread().ident
    parts = []
    for ident, frame in sorted(sys._current_frames().items(), key=lambda item: item[0] != main):
        if not names.get(ident, "").startswith("torchloom-"):
            lines = "".join(traceback.format_stack(frame, limit=50))
            parts.append(f"thread {names.get(ident, ident)}:\n{lines}")
    return "\n".join(parts)[:MAX_TEXT]


_stacks: Stacks | None = None


def of_this_process() -> Stacks | None:
    """The stacks of this process; None if they cannot be created."""
    global _stacks  # noqa: PLW0603  a process has one
    if _stacks is None:
        with contextlib.suppress(Exception):  # no memfd here, or no descriptor left
            _stacks = Stacks()
    return _stacks


def forget() -> None:
    """In a forked child: drop the parent's."""
    global _stacks
    stacks, _stacks = _stacks, None
    if stacks is not None:
        with contextlib.suppress(Exception):
            stacks.close()
