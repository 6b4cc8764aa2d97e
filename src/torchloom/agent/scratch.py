"""A temporary folder for as long as this process lives. What a killed one left behind, the next one removes.

The owner holds a lock on a file in it, which the kernel takes away with the process, however that dies.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

LOCK = "owner.lock"
YOUNG = 60.0
"""Seconds for which a folder without a lock may be one that is just being made."""


@contextlib.contextmanager
def scratch(prefix: str) -> Iterator[Path]:
    remove_abandoned(prefix)
    folder = Path(tempfile.mkdtemp(prefix=prefix))
    lock = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def remove_abandoned(prefix: str) -> None:
    """Those of this user whose owner is dead."""
    for folder in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
        with contextlib.suppress(OSError):
            state = folder.lstat()
            if state.st_uid == os.getuid() and folder.is_dir() and not folder.is_symlink():
                _remove_if_abandoned(folder, state.st_mtime)


def _remove_if_abandoned(folder: Path, changed: float) -> None:
    try:
        lock = os.open(folder / LOCK, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        if time.time() - changed > YOUNG:
            shutil.rmtree(folder, ignore_errors=True)
        return
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return  # someone lives in it
    else:
        shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(lock)
