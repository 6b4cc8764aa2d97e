"""Locks of a checkpoint folder: one job writes into it, any number may read, and what is being read is not deleted.

The writer's lock is a POSIX lock: it ends with its process, and forked children (loaders) do not inherit it. It would
also end with the first close() of that file anywhere in the process, so nothing else opens it. Readers hold a flock on
a checkpoint's manifest, which belongs to the open file. On a filesystem without locks nothing is locked.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import logging
import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import msgspec

from torchloom.checkpoints.store.manifest import NAME
from torchloom.errors import AlreadyUp, BadState
from torchloom.shared.json_decoding import decoder

logger = logging.getLogger("torchloom")
WRITER: Final = ".writer"
PRUNER: Final = ".pruner"
WITHOUT = frozenset({errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL})
"""Errors of a filesystem without locks."""
PATIENCE = 5.0
"""Seconds to wait for a killed process to end."""


class Owner(msgspec.Struct, frozen=True):
    """Written into the lock file, to be shown to a second writer."""

    job: str = ""
    host: str = ""
    pid: int = 0


_held: dict[str, tuple[int, int]] = {}
"""The folders that this process writes into, each with its lock file and the number of its users."""
_guard = threading.Lock()


def _forget() -> None:
    """In a forked child: the lock is the parent's. Closing its file here releases nothing."""
    global _guard  # noqa: PLW0603  the old one may be held by a thread that does not exist here
    _guard = threading.Lock()
    for file, _ in _held.values():
        with contextlib.suppress(OSError):
            os.close(file)
    _held.clear()


@functools.cache
def _hook_at_fork() -> None:
    """Once in a process that writes checkpoints, and in those forked from it."""
    os.register_at_fork(after_in_child=_forget)


class WriterLock:
    """Makes this process the writer of a folder."""

    def __init__(self, folder: Path, job: str = "", patience: float = PATIENCE) -> None:
        _hook_at_fork()
        self._key = os.path.realpath(folder)
        self._pid = os.getpid()
        self.first = False
        """There is no other writer, in this process or another: incomplete checkpoints may be removed."""
        with _guard:
            held = _held.get(self._key)
            if held is None:
                file, self.first = _take(folder, Owner(job, socket.gethostname(), os.getpid()), patience)
                held = (file, 0)
            _held[self._key] = (held[0], held[1] + 1)

    @property
    def held(self) -> bool:
        """False in a forked child: the lock is still the parent's."""
        return self._pid == os.getpid()

    def close(self) -> None:
        with _guard:
            held = _held.get(self._key)
            if held is None or self._pid != os.getpid():
                return
            self._pid = 0
            if held[1] > 1:
                _held[self._key] = (held[0], held[1] - 1)
            else:
                del _held[self._key]
                os.close(held[0])


def _take(folder: Path, owner: Owner, patience: float) -> tuple[int, bool]:
    """The open file, and whether it is locked."""
    try:
        file = _open_or_create(folder / WRITER)
    except OSError as error:
        raise BadState(
            f"cannot write into {folder}: {error.strerror}",
            hint="checkpoints need a folder that this user may write to",
        ) from error
    end = time.monotonic() + patience
    while True:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in WITHOUT:
                logger.warning("torchLoom: %s is on a filesystem without locks; see that one job writes there", folder)
                return file, False
            if time.monotonic() < end:
                time.sleep(0.05)
                continue
            owner_text = _describe_owner(file)
            os.close(file)
            raise AlreadyUp(
                f"another job writes its checkpoints into {folder}: {owner_text}",
                hint="give each job a folder of its own",
            ) from None
        with contextlib.suppress(OSError):  # a full disk: the lock is held anyway
            os.ftruncate(file, 0)
            os.pwrite(file, msgspec.json.encode(owner), 0)
        return file, True


def _open_or_create(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)


def _describe_owner(file: int) -> str:
    try:
        owner = decoder(Owner)(os.pread(file, 4096, 0))
    except (OSError, msgspec.MsgspecError):
        return "it does not say which"
    return f"{owner.job or 'a job without a name'}, pid {owner.pid} on {owner.host}"


@contextlib.contextmanager
def reading(checkpoint: Path) -> Iterator[None]:
    """Retention does not delete the checkpoint inside this block."""
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):  # a foreign checkpoint, or none: retention does not delete those
            fcntl.flock(stack.enter_context((checkpoint / NAME).open("rb")), fcntl.LOCK_SH)
        yield


def _open_for_lock(path: Path) -> int:
    """Open for writing, which some filesystems require for an exclusive lock; else for reading."""
    try:
        return os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except PermissionError:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)


@contextlib.contextmanager
def deleting(checkpoint: Path) -> Iterator[bool]:
    """Whether the checkpoint has no readers; if so, none can start inside this block."""
    with contextlib.ExitStack() as stack:
        free = True
        try:
            file = stack.enter_context(os.fdopen(_open_for_lock(checkpoint / NAME), "rb"))
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:  # without a manifest there can be no readers
            free = isinstance(error, FileNotFoundError) or error.errno in WITHOUT
        yield free


@contextlib.contextmanager
def pruning(folder: Path) -> Iterator[None]:
    """Only one process prunes at a time: two with different rules could each delete what the other keeps."""
    with os.fdopen(_open_or_create(folder / PRUNER), "rb") as file:
        with contextlib.suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
