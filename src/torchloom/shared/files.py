"""Files that appear whole or not at all, that survive a power failure, and that one process at a time may hold."""

from __future__ import annotations

import contextlib
import fcntl
import os
from pathlib import Path


def write_durably(path: Path, data: bytes, mode: int = 0o666) -> None:
    """Write a file and sync it. Its name is durable when `sync_folder` has synced the folder."""
    _write(path, data, mode, sync=True)


def replace_file(path: Path, data: bytes, *, sync: bool = True) -> None:
    """Replace a private file atomically: readers see the old content or the new one. On OSError the old one stays."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        _write(beside, data, 0o600, sync)
        beside.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            beside.unlink()
        raise


def _write(path: Path, data: bytes, mode: int, sync: bool) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
    with os.fdopen(os.open(path, flags, mode), "wb") as file:
        file.write(data)
        file.flush()
        if sync:
            os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Sync a folder, which makes names in it durable."""
    file = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def open_locked(path: Path, *, record_lock: bool = False) -> int | None:
    """Open a file and lock it exclusively; None if another process holds the lock. Closing the file releases it.

    Forked children hold the lock too, until they close the file; a record lock (fcntl) they do not.
    """
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    lock = fcntl.lockf if record_lock else fcntl.flock
    try:
        lock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(file)
        if isinstance(error, (BlockingIOError, PermissionError)):  # POSIX allows both for a record lock
            return None
        raise
    return file
