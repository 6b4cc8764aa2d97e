"""The checksums of a checkpoint's files: computed while they are written, and verified on all cores.

Computing and writing release the interpreter lock, so the writing thread hardly slows down training,
and verifying a checkpoint is faster than loading it.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import stat
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from torchloom.checkpoints.store import manifest as manifests
from torchloom.checkpoints.store.manifest import CHUNK, FileEntry, Manifest
from torchloom.errors import Damaged

try:  # CRC-32 as in zip files; ISA-L computes it several times faster than zlib
    from isal.isal_zlib import crc32
except ImportError:  # no wheel for this machine
    from zlib import crc32

WRITE_BYTES = 1024 * 1024
"""Bytes checksummed and written at once, while they are in the processor's cache."""
READ_BYTES = 256 * 1024
"""Bytes read and checksummed at once, without the interpreter lock."""
THREADS = min(8, os.cpu_count() or 1)
Signature = tuple[tuple[str, int, int, int], ...]
"""Name, inode, size and time of the last change of each file."""


class ChecksummedFile:
    """The subset of a binary file's interface that torch.save and torch.distributed.checkpoint need."""

    def __init__(self, path: Path, grown: Callable[[int], None] = lambda _: None, chunk: int = CHUNK) -> None:
        self.path = path
        self.error: OSError | None = None
        """What stopped it; raised at the end too, because some callers replace an error of write() by their own."""
        self._grown = grown
        self._chunk = chunk
        self._size = 0
        self._crcs: list[int] = []
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)

    def write(self, data: bytes | bytearray | memoryview) -> int:
        with memoryview(data) as given, given.cast("B") as view:
            at = 0
            while at < view.nbytes:
                room = self._chunk - self._size % self._chunk
                with view[at : at + min(WRITE_BYTES, room)] as piece:
                    at += self._take(piece)
            return view.nbytes

    def _take(self, piece: memoryview) -> int:
        if self._size % self._chunk == 0:
            self._crcs.append(0)
        self._crcs[-1] = crc32(piece, self._crcs[-1])
        try:
            written = 0
            while written < piece.nbytes:
                written += os.write(self._fd, piece[written:])
        except OSError as error:
            self.error = error
            raise
        self._size += piece.nbytes
        if self._size % self._chunk == 0:
            start_writing(self._fd, self._size - self._chunk, self._chunk)
        self._grown(piece.nbytes)
        return piece.nbytes

    def tell(self) -> int:
        return self._size

    def flush(self) -> None:
        """Does nothing: there is no buffer."""

    def fileno(self) -> int:
        return self._fd

    def finish(self) -> FileEntry:
        """Make it durable; returns its entry."""
        os.fsync(self._fd)
        return self.entry

    @property
    def entry(self) -> FileEntry:
        """The entry of what was written so far."""
        return FileEntry(name=self.path.name, size=self._size, chunk=self._chunk, crcs=tuple(self._crcs))

    def close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def __enter__(self) -> ChecksummedFile:
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        self.close()
        if isinstance(error, Exception) and self.error is not None:
            raise self.error from None  # torch reports it as an unexpected position in the file


def describe(path: Path, chunk: int = CHUNK) -> FileEntry:
    """The entry of a small file, read back without threads, which cannot be started while the interpreter exits."""
    data = path.read_bytes()
    crcs = tuple(crc32(data[at : at + chunk]) for at in range(0, len(data), chunk))
    return FileEntry(name=path.name, size=len(data), chunk=chunk, crcs=crcs)


def start_writing(file: int, at: int, size: int) -> None:
    """Start writing a part of a file to disk, so that the sync at the end has little left to do."""
    if _sync_file_range is not None:  # where it cannot, the sync does it all
        _sync_file_range(file, ctypes.c_int64(at), ctypes.c_int64(size), _WRITE)


_WRITE = 2
_sync_file_range = getattr(ctypes.CDLL(None), "sync_file_range", None) if sys.platform == "linux" else None


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
    with memoryview(bytearray(min(READ_BYTES, end - start))) as buffer:
        while start < end:
            count = os.preadv(fd, [buffer[: end - start]], start)
            if count == 0:
                raise OSError(errno.EIO, "it was cut off while it was read")
            crc = crc32(buffer[:count], crc)
            start += count
    return crc
