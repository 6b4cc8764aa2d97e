"""A process that ends when its parent is dead."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def die_with(parent: int, number: signal.Signals = signal.SIGKILL) -> None:
    """This signal for this process as soon as that parent is dead; also if it died just before. Linux alone can do it.

    The kernel watches the *thread* that forked, so a parent must fork where its life is: in its main thread.
    """
    if not sys.platform.startswith("linux"):
        return
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, int(number), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent:
        os.kill(os.getpid(), number)
