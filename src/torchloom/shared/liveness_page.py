"""The page of memory that a rank shares with the agent on its machine, so that the agent can see whether it is alive.

A rank that is stopped, or whose interpreter is held by C code, cannot send anything, but its memory can be read. Each
rank therefore has a page (a memfd named `torchloom-page`). The training thread and the link thread write marks into it,
each with one aligned store: 40 ns, no lock, no system call. An agent finds the page among the open files of the
process, and can still read the last marks after the process has ended.

An agent writes one mark, `wanted`: how often it asked for the rank's stacks. The link thread writes the stacks into a
second memfd, `torchloom-stacks`, and counts that in `shown`. If the link thread does not get to run, the signal in
`signal` makes the interpreter write them.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import re
from io import FileIO
from pathlib import Path

PAGE, STACKS = "torchloom-page", "torchloom-stacks"
SIZE = 4096
VERSION = 1
MAGIC = int.from_bytes(b"loom\0\0\0", "little") | VERSION << 56

# Places of 8 bytes each.
_MAGIC, STEP, TICK, WANTED, SHOWN, SIGNAL, STARTED, PAUSED, COLLECTING, COLLECTIVES = range(10)
_PHASE_AT = 64 * 8
"""Offset of the name of the phase: one byte of length, then ASCII."""
_NAME = 32
PHASE = re.compile(r"[A-Za-z0-9_-]{1,32}")


class Page:
    """The rank's side."""

    def __init__(self) -> None:
        self.fd = os.memfd_create(PAGE, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self.fd, SIZE)
            # Without the seals a process could truncate the page, and reading it would kill the agent with SIGBUS.
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
            self._map = mmap.mmap(self.fd, SIZE)
        except BaseException:
            os.close(self.fd)
            raise
        self.marks = memoryview(self._map).cast("Q")
        """Written by step() directly: marks[STEP] is the number of finished steps."""
        self.marks[_MAGIC] = MAGIC
        self.inode = os.fstat(self.fd).st_ino

    def reset(self) -> None:
        """For an incarnation that takes over the page of an earlier one."""
        for place in (STEP, STARTED, PAUSED, COLLECTING, COLLECTIVES):
            self.marks[place] = 0

    def phase(self, name: str) -> None:
        text = name.encode("ascii", "replace")[:_NAME]
        self._map[_PHASE_AT : _PHASE_AT + 1 + len(text)] = bytes([len(text)]) + text

    def close(self) -> None:
        self.marks.release()
        self._map.close()
        close_own(self.fd, self.inode)


class View:
    """The agent's side: the page of another process. It stays readable after that process has ended."""

    def __init__(self, pid: int, path: Path, proc: Path) -> None:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            if not fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
                raise ValueError("a page that may be cut off")
            self._map = mmap.mmap(fd, SIZE)
            self._inode = os.fstat(fd).st_ino
        finally:
            os.close(fd)
        self.marks = memoryview(self._map).cast("Q")
        self.pid = pid
        self._proc = proc
        if self.marks[_MAGIC] != MAGIC:
            raise ValueError("a page of another version")

    @property
    def phase(self) -> str:
        length = min(self._map[_PHASE_AT], _NAME)
        name = self._map[_PHASE_AT + 1 : _PHASE_AT + 1 + length].decode("ascii", "replace")
        return name if PHASE.fullmatch(name) else ""

    @property
    def current(self) -> bool:
        """Whether the process still has this page. A program that it has exec'ed has another one, or none."""
        with contextlib.suppress(OSError):
            return _find(self.pid, PAGE, self._proc).stat().st_ino == self._inode
        return False

    def open_stacks(self) -> FileIO:
        """The memfd with the rank's stacks. OSError if the process has none, or is gone."""
        return _find(self.pid, STACKS, self._proc).open("r+b", buffering=0)


def close_own(fd: int, inode: int) -> None:
    """Close a descriptor, unless the script has closed it and its number now belongs to another file."""
    with contextlib.suppress(OSError):
        if os.fstat(fd).st_ino == inode:
            os.close(fd)


def view(pid: int, proc: Path = Path("/proc")) -> View | None:
    """The page of a process, if it has one that this process may open."""
    with contextlib.suppress(OSError, ValueError):
        return View(pid, _find(pid, PAGE, proc), proc)
    return None


def _find(pid: int, name: str, proc: Path) -> Path:
    """The path of the memfd among the open files of the process; the newest, if an inherited one is open too."""
    folder = proc / str(pid) / "fd"
    for fd in sorted(os.listdir(folder), key=int, reverse=True):  # noqa: PTH208  the names are all that is needed
        with contextlib.suppress(OSError):
            if os.readlink(folder / fd).startswith(f"/memfd:{name}"):  # noqa: PTH115  as fast
                return folder / fd
    raise FileNotFoundError(f"process {pid} has no {name}")
