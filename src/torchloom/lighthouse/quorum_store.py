"""What survives a restart of the lighthouse: one small file in a folder that one lighthouse at a time may use.

The file is written to a temporary name, synced and renamed before anyone is told of the quorum in it, so that a quorum
number is never used twice. It is written when a quorum gets a new number and when a member is evicted, not at every
step.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from pathlib import Path

import msgspec

from torchloom.errors import AlreadyUp, BadState
from torchloom.lighthouse.quorum import DurableState

STATE = "quorum.json"
PORT = "port"
_LOCK = "lock"


class QuorumStore:
    """Holds the lock of the folder until `close`, or until the process ends."""

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
            self.durable = self._read()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        os.close(self._lock)

    def write(self, durable: DurableState) -> None:
        """Write durably; on OSError the previous state stays."""
        self._replace(STATE, msgspec.json.encode(durable))
        self.durable = durable

    def _read(self) -> DurableState:
        path = self.folder / STATE
        try:
            return msgspec.json.decode(path.read_bytes(), type=DurableState)
        except FileNotFoundError:
            return DurableState()
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
        """Replicas expect the lighthouse on this port after a restart. A failure to write it is ignored."""
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
