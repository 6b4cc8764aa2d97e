"""Where a process's stacks can be read from outside: a memfd that the interpreter writes them into.

On a wish the link thread has it done, which is safe at any time. A signal does it too, and needs no interpreter lock:
so a rank can be seen into whose interpreter is held by C code. The signal is a real-time one that nobody here uses; its
handler restarts system calls, so training does not notice. There is one such file for a process, kept to its end.
"""

from __future__ import annotations

import contextlib
import faulthandler
import fcntl
import os
import signal
from pathlib import Path

from torchloom.page import STACKS, close_own

MOST = 4 * 1024 * 1024
"""Bytes kept; whoever reads them empties the file."""
SPARED = 2
"""Real-time signals at the top that are left to others."""


class Stacks:
    def __init__(self, status: Path = Path("/proc/self/status")) -> None:
        self.fd = os.memfd_create(STACKS)
        self._inode = os.fstat(self.fd).st_ino
        self.signal = 0
        """What makes the interpreter write them; 0 if nothing does."""
        with contextlib.suppress(Exception):
            fcntl.fcntl(self.fd, fcntl.F_SETFL, fcntl.fcntl(self.fd, fcntl.F_GETFL) | os.O_APPEND)
        with contextlib.suppress(Exception):
            number = free_signal(status)
            if number:
                faulthandler.register(number, file=self.fd, all_threads=True, chain=False)
                self.signal = number

    def show(self) -> None:
        """Write where every thread is."""
        known = os.fstat(self.fd)
        if known.st_ino != self._inode:
            return  # the script has closed it, and the number is another file's
        if known.st_size > MOST:
            os.ftruncate(self.fd, 0)
        faulthandler.dump_traceback(file=self.fd, all_threads=True)

    def close(self) -> None:
        """In a forked child, to which they do not belong."""
        if self.signal:
            faulthandler.unregister(self.signal)
            self.signal = 0
        close_own(self.fd, self._inode)

    def check_signal(self) -> int:
        """The signal, as long as nobody else has taken it."""
        if self.signal and signal.getsignal(self.signal) not in {None, signal.SIG_DFL}:
            self.signal = 0
        return self.signal


def free_signal(status: Path) -> int:
    """A real-time signal with which nobody does anything; 0 if there is none, or it cannot be known."""
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
    """None where there can be none."""
    global _stacks  # noqa: PLW0603  a process has one
    if _stacks is None:
        with contextlib.suppress(Exception):  # no memfd here, or no descriptor left
            _stacks = Stacks()
    return _stacks


def forget() -> None:
    """In a forked child: those are the parent's."""
    global _stacks
    stacks, _stacks = _stacks, None
    if stacks is not None:
        with contextlib.suppress(Exception):
            stacks.close()
