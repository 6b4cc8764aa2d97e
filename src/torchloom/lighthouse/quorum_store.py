"""What survives a restart of the lighthouse: one small file in a folder that one lighthouse at a time may use.

The file is replaced atomically and synced before the quorum in it is announced, so that no quorum number is used twice.
It is written when a quorum gets a new number and when a member is evicted, not at every step.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import msgspec

from torchloom.errors import AlreadyUp, BadState
from torchloom.lighthouse.quorum import DurableState
from torchloom.shared.files import open_locked, replace_file, sync_folder
from torchloom.shared.json_decoding import read_file

STATE = "quorum.json"
PORT = "port"
_LOCK = "lock"
_DAMAGED = "it says which quorums there were: remove it only when no replica of the job runs any more"


class QuorumStore:
    """Holds the lock of the folder until `close`, or until the process ends."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            lock = open_locked(folder / _LOCK)
        except OSError as error:
            raise BadState(
                f"{folder} cannot be used: {error.strerror}", hint="--folder or --state names another"
            ) from error
        if lock is None:
            raise AlreadyUp(
                f"another lighthouse has {folder}", hint="a job has one: give this one another --job, or end that one"
            )
        self._lock = lock
        try:
            self.durable = read_file(folder / STATE, DurableState, _DAMAGED) or DurableState()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        os.close(self._lock)

    def write(self, durable: DurableState) -> None:
        """Write durably; on OSError the previous state stays."""
        replace_file(self.folder / STATE, msgspec.json.encode(durable))
        sync_folder(self.folder)
        self.durable = durable

    # ── where it listened ──

    def last_port(self) -> int:
        """0 if there was none."""
        with contextlib.suppress(OSError, ValueError):
            return int((self.folder / PORT).read_text())
        return 0

    def note_port(self, port: int) -> None:
        """Replicas expect the lighthouse on this port after a restart. A failure to write it is ignored."""
        with contextlib.suppress(OSError):
            if self.last_port() != port:
                replace_file(self.folder / PORT, str(port).encode())
                sync_folder(self.folder)
