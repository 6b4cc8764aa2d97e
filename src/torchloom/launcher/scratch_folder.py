"""A temporary folder for as long as this process lives. What a killed one left behind, the next one removes.

The owner holds a lock on a file in it, which the kernel takes away with the process, however that dies.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from torchloom.shared.files import open_locked

LOCK = "owner.lock"
OURS = b"a folder of torchLoom, removed with its owner\n"


@contextlib.contextmanager
def scratch(prefix: str) -> Iterator[Path]:
    remove_abandoned(prefix)
    folder = Path(tempfile.mkdtemp(prefix=prefix))
    beside = folder / f".{LOCK}"
    lock = open_locked(beside)
    assert lock is not None, "the folder is new"
    try:
        os.write(lock, OURS)
        beside.rename(folder / LOCK)  # held already when it appears
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def remove_abandoned(prefix: str) -> None:
    """Those of this user whose owner is dead; only what has our mark in it was made here."""
    for folder in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
        with contextlib.suppress(OSError):  # such as BlockingIOError: someone lives in it
            if folder.lstat().st_uid == os.getuid() and folder.is_dir() and not folder.is_symlink():
                _remove_if_abandoned(folder)


def _remove_if_abandoned(folder: Path) -> None:
    with os.fdopen(os.open(folder / LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW), "rb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if lock.read(100) == OURS:
            shutil.rmtree(folder, ignore_errors=True)
