"""A file that computes its checksums while it is written, once and from start to end.

Computing and writing release the interpreter lock, so the writing thread hardly slows down training.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable
from pathlib import Path

from torchloom.checkpoints.store.manifest import CHUNK, FileEntry

__all__ = ["ChecksummedFile", "crc32", "describe"]

try:  # CRC-32 as in zip files; ISA-L computes it several times faster than zlib
    from isal.isal_zlib import crc32
except ImportError:  # no wheel for this machine
    from zlib import crc32

PIECE = 1024 * 1024
"""Bytes checksummed and written at once, while they are in the processor's cache."""


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
                with view[at : at + min(PIECE, room)] as piece:
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
    if _sync_file_range is not None:
        _sync_file_range(
            file, ctypes.c_int64(at), ctypes.c_int64(size), _WRITE
        )  # where it cannot, the sync does it all


_WRITE = 2
_sync_file_range = getattr(ctypes.CDLL(None), "sync_file_range", None) if sys.platform == "linux" else None
