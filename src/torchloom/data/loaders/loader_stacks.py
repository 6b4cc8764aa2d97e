"""The stack of a loader process, read from the training process: what a loader that hangs is doing.

A loader prepares a memfd into which faulthandler writes its stacks when a signal arrives, also while C code holds the
interpreter. The training process finds both in /proc.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from torchloom.data.loaders import process_control

_FILE = "torchloom-stack"
_SIGNAL = signal.SIGRTMAX - 3 if sys.platform == "linux" else 0
_ANSWER_SECONDS = 0.5
_OUTERMOST = f'"{Path(__file__).with_name("loader_process.py")}"'
"""Its frame called what a loader is doing; the frames outside of it started the process."""
MOST_CHARACTERS = 8000


def name_of(loader: int) -> str:
    return f"loom-loader-{loader}"


def prepare(loader: int) -> None:
    """In a loader process. Its name comes last: nobody signals a process that is not prepared."""
    with contextlib.suppress(OSError, ValueError):  # no descriptor is left: it loads all the same
        faulthandler.register(_SIGNAL, file=os.memfd_create(_FILE, os.MFD_CLOEXEC), all_threads=True)
        process_control.set_name(name_of(loader))


def find(zygote: int, loader: int) -> int:
    """The process id of a loader; 0 if it cannot be found."""
    with contextlib.suppress(OSError):
        for child in Path(f"/proc/{zygote}/task/{zygote}/children").read_text().split():
            if Path(f"/proc/{child}/comm").read_text().strip() == name_of(loader):
                return int(child)
    return 0


def read(pid: int) -> str:
    """What the process is doing, as far as that can be learnt; empty if it has gone."""
    with contextlib.suppress(OSError):
        status = Path(f"/proc/{pid}/status").read_text()
        state = next(line.partition(":")[2].strip() for line in status.splitlines() if line.startswith("State:"))
        return f"state {state}\n{_dump(pid)}".strip()[:MOST_CHARACTERS]
    return ""


def _dump(pid: int) -> str:
    file = next(filter(_is_ours, Path(f"/proc/{pid}/fd").iterdir()), None)
    if file is None:
        return ""
    before = file.stat().st_size
    os.kill(pid, _SIGNAL)
    deadline, size = time.monotonic() + _ANSWER_SECONDS, before
    while time.monotonic() < deadline:
        time.sleep(0.01)
        last, size = size, file.stat().st_size
        if size > before and size == last:
            break
    return "\n".join(_inner_frames(file.read_bytes()[before:].decode(errors="replace")))


def _inner_frames(dump: str) -> Iterator[str]:
    """faulthandler writes the innermost frame of each thread first."""
    is_inner = True
    for line in dump.splitlines():
        is_inner = is_inner or not line.startswith("  ")
        if is_inner:
            yield line
        is_inner = is_inner and _OUTERMOST not in line


def _is_ours(file: Path) -> bool:
    with contextlib.suppress(OSError):  # closed meanwhile
        return f"/memfd:{_FILE}" in str(file.readlink())
    return False
