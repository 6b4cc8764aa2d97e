"""What the kernel knows of a process of ours: its name, and that it ends with its parent."""

from __future__ import annotations

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15


def set_name(name: str) -> None:
    """The name in `ps`, `top` and /proc: at most 15 bytes."""
    _prctl(_PR_SET_NAME, ctypes.c_char_p(name.encode()))


def end_with_parent(parent: int) -> None:
    """Let the kernel kill this process when the parent that forked it, in its only thread, has ended."""
    _prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL))
    if os.getppid() != parent:
        os._exit(1)


def _prctl(option: int, argument: ctypes.c_char_p | ctypes.c_ulong) -> None:
    ctypes.CDLL(None).prctl(option, argument, 0, 0, 0)
