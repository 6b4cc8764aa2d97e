"""The stacks of a process for the agent to read: a memfd that the interpreter writes them into.

On request the link thread has them written, which is safe at any time. A signal does it too, and needs no interpreter
lock, so it works while C code holds the interpreter. The signal is a real-time one that this process does not use; its
handler restarts system calls, so training is not disturbed. A process has one such file, until it ends.
"""

from __future__ import annotations

import contextlib
import faulthandler
import fcntl
import os
import signal
from pathlib import Path

from torchloom.shared.liveness_page import STACKS, close_own

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
