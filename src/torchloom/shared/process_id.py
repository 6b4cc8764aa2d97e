"""An id of a process that any process on the same kernel can use to find out whether it has ended.

A pid is not enough: it may belong to another machine or container, or have been reused.
"""

from __future__ import annotations

import functools
import os
from pathlib import Path

_STATE, _THREADS, _STARTED = 0, 17, 19
"""Fields of /proc/PID/stat, counted after the name, which may itself contain spaces and parentheses."""


def process_id(pid: int | None = None) -> str:
    """The id of this process, or of one in the same pid namespace; empty where there is no /proc."""
    pid = os.getpid() if pid is None else pid
    stat, kernel = _stat(pid), _kernel()
    return f"{kernel} {pid} {stat[_STARTED]}" if stat and kernel else ""


def has_ended(process: str) -> bool:
    """Whether the process has certainly ended. False if that cannot be known from here."""
    kernel, pid, started = [*process.rsplit(" ", 2), "", ""][:3]
    if not kernel or kernel != _kernel() or not pid.isdigit():
        return False
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return True
    except (PermissionError, OverflowError):
        pass  # it belongs to another user, whose /proc may be hidden
    stat = _stat(int(pid))
    if not stat:
        return False
    dead = stat[_STATE] in "ZX" and int(stat[_THREADS]) <= 1  # with more threads, only the first one has ended
    return dead or stat[_STARTED] != started


@functools.cache
def _kernel() -> str:
    """The boot id of this machine, and the pid namespace."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return ""


def _stat(pid: int) -> list[str]:
    """The fields after the name; empty where they cannot be read."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (OSError, ValueError):
        return []
    return fields if len(fields) > _STARTED else []
