"""An id of a process that any process on the same kernel can use to find out whether it has ended.

A pid is not enough: it may belong to another machine or container, or have been reused.
"""

from __future__ import annotations

import contextlib
import functools
import os
from pathlib import Path

_STATE, _THREADS, _STARTED = 0, 17, 19
"""Places of fields in the result of `read_stat`."""


def process_id(pid: int | None = None) -> str:
    """The id of this process, or of one in the same pid namespace; empty where there is no /proc."""
    pid = os.getpid() if pid is None else pid
    stat, kernel = read_stat(Path(f"/proc/{pid}")), _kernel()
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
    stat = read_stat(Path(f"/proc/{pid}"))
    if not stat:
        return False
    dead = stat[_STATE] in "ZX" and int(stat[_THREADS]) <= 1  # with more threads, only the first one has ended
    return dead or stat[_STARTED] != started


@functools.cache
def _kernel() -> str:
    """The boot id of this machine, and the pid namespace."""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    return ""


def read_stat(folder: Path) -> list[str]:
    """The fields of a process or thread after its name; empty where they cannot be read. `folder` is its own in /proc.

    The name may contain anything, even spaces and parentheses: what counts comes after the last of them.
    """
    with contextlib.suppress(OSError):
        return (folder / "stat").read_text(errors="replace").rpartition(")")[2].split()
    return []
