"""What a lighthouse remembers over its own death: one small file in a folder that one lighthouse at a time has.

The file is written beside, flushed to the disk and renamed, before anyone hears of the quorum in it: so a number that
was heard of is never given again. It is written when a quorum gets a new number and when a member is evicted, not at
every step.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from pathlib import Path

import msgspec

from torchloom.core.quorum import Kept
from torchloom.errors import AlreadyUp, BadState

STATE = "quorum.json"
PORT = "port"
_LOCK = "lock"


class Keeping:
    """Holds the folder until `close`, or until the process ends."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise BadState(
                f"{folder} cannot be used: {error.strerror}", hint="--folder or --state names another"
            ) from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._lock)
            raise AlreadyUp(
                f"another lighthouse has {folder}", hint="a job has one: give this one another --job, or end that one"
            ) from None
        try:
            self.kept = self._read()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        os.close(self._lock)

    def write(self, kept: Kept) -> None:
        """Durably, or OSError and what was there stays."""
        self._replace(STATE, msgspec.json.encode(kept))
        self.kept = kept

    def _read(self) -> Kept:
        path = self.folder / STATE
        try:
            return msgspec.json.decode(path.read_bytes(), type=Kept)
        except FileNotFoundError:
            return Kept()
        except OSError as error:
            raise BadState(f"cannot read {path}: {error.strerror}") from error
        except msgspec.MsgspecError as error:
            raise BadState(
                f"{path} is damaged: {error}",
                hint="it says which quorums there were: remove it only when no replica of the job runs any more",
            ) from error

    # ── where it listened ──

    def last_port(self) -> int:
        """0 if there was none."""
        try:
            return int((self.folder / PORT).read_text())
        except (OSError, ValueError):
            return 0

    def note_port(self, port: int) -> None:
        """Replicas look for it there after a restart. Nothing is lost but that if it cannot be written."""
        with contextlib.suppress(OSError):
            if self.last_port() != port:
                self._replace(PORT, str(port).encode())

    def _replace(self, name: str, data: bytes) -> None:
        beside = self.folder / f".{name}"
        fd = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(fd, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(self.folder / name)
        folder = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
