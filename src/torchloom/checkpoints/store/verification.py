"""Verifies every byte of a checkpoint against its checksums, on all cores: faster than loading it."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from torchloom.checkpoints.store import manifest as manifests
from torchloom.checkpoints.store.checksums import crc32
from torchloom.checkpoints.store.manifest import FileEntry, Manifest
from torchloom.errors import Damaged

PIECE = 256 * 1024
"""Bytes read and checksummed at once, without the interpreter lock."""
THREADS = min(8, os.cpu_count() or 1)
Signature = tuple[tuple[str, int, int, int], ...]
"""Name, inode, size and time of the last change of each file."""


def signature(folder: Path) -> Signature:
    """Changes when a file is modified, but not when a disk loses a bit."""
    files = []
    with contextlib.suppress(OSError):
        for entry in os.scandir(folder):
            with contextlib.suppress(OSError):  # deleted in the meantime
                stat = entry.stat(follow_symlinks=False)
                files.append((entry.name, stat.st_ino, stat.st_size, stat.st_mtime_ns))
    return tuple(sorted(files))


def verify(folder: Path) -> Manifest:
    """The manifest of a checkpoint after verifying every byte; raises Damaged, naming the place, otherwise."""
    manifest = manifests.read(folder)
    for file in manifest.files:
        _verify_file(folder, file)
    return manifest


def check_sizes(folder: Path, manifest: Manifest) -> None:
    """Check that every file in the manifest exists and has the right size, without reading it."""
    for file in manifest.files:
        try:
            status = os.lstat(f"{folder}/{file.name}")
        except OSError as error:
            raise _unreadable(folder, file, error) from error
        _check_size(folder, file, status)


def _check_size(folder: Path, file: FileEntry, status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise Damaged(folder, f"{file.name} is not a file")
    if status.st_size != file.size:
        raise Damaged(folder, f"{file.name} has {status.st_size} bytes instead of {file.size}")


def _unreadable(folder: Path, file: FileEntry, error: OSError) -> Damaged:
    missing = isinstance(error, FileNotFoundError)
    return Damaged(folder, f"{file.name} is missing" if missing else f"{file.name} cannot be read: {error.strerror}")


def _verify_file(folder: Path, file: FileEntry) -> None:
    path = folder / file.name
    try:
        # Do not follow links, because a checkpoint is what its folder contains, and do not block on a pipe.
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise _unreadable(folder, file, error) from error
    try:
        before = os.fstat(fd)
        _check_size(folder, file, before)
        wrong = [index for index, crc in enumerate(checksums(fd, file.size, file.chunk)) if crc != file.crcs[index]]
        if wrong:
            where = f"bytes {wrong[0] * file.chunk} to {min(file.size, (wrong[0] + 1) * file.chunk)}"
            more = f" and {len(wrong) - 1} more places" if len(wrong) > 1 else ""
            raise Damaged(folder, f"{file.name} differs in {where}{more}")
        after = path.lstat()
        same = (before.st_ino, before.st_size, before.st_mtime_ns) == (after.st_ino, after.st_size, after.st_mtime_ns)
        if not same:
            raise Damaged(folder, f"{file.name} was replaced while it was read")
    except OSError as error:
        raise Damaged(folder, f"{file.name} cannot be read: {error.strerror or error}") from error
    finally:
        os.close(fd)


def checksums(fd: int, size: int, chunk: int) -> list[int]:
    """CRC-32 of each chunk of an open file. Raises OSError if it cannot be read or is truncated meanwhile."""
    with ThreadPoolExecutor(THREADS) as pool:
        return list(pool.map(lambda start: _crc(fd, start, min(size, start + chunk)), range(0, size, chunk)))


def _crc(fd: int, start: int, end: int) -> int:
    """Read instead of mapping it: a bad or missing sector under a mapped page would kill the process."""
    crc = 0
    with memoryview(bytearray(min(PIECE, end - start))) as buffer:
        while start < end:
            count = os.preadv(fd, [buffer[: end - start]], start)
            if count == 0:
                raise OSError(errno.EIO, "it was cut off while it was read")
            crc = crc32(buffer[:count], crc)
            start += count
    return crc
