"""One save: what is known when it starts, how far it is, and how it ended; and that of a single process."""

from __future__ import annotations

import errno
import os
import threading
import time
from pathlib import Path
from typing import Any, Literal, Protocol

import msgspec

from torchloom.checkpoints import torch_files
from torchloom.checkpoints.staging import StagedState, StagingBuffers
from torchloom.checkpoints.store import commit
from torchloom.checkpoints.store.manifest import FileEntry, Manifest
from torchloom.errors import TorchLoomError


class PreparedSave(Protocol):
    """A state that was copied out of training and can be written on any thread."""

    layout: Literal["single", "sharded"]
    size: int

    def write(self) -> None:
        """Write until it is durable and in its place."""

    def release(self) -> None:
        """Its buffers may be used again."""


class PendingSave:
    """A checkpoint that a thread writes while training continues."""

    def __init__(self, step: int, path: Path) -> None:
        self.step = step
        self.path = path
        """Where it will be."""
        self.manifest = Manifest(step=step, files=())
        """Without the files and all that is known only at the end."""
        self.began = time.monotonic()
        """When the copy began, on the monotonic clock."""
        self.stall = 0.0
        """Seconds for which training stood still."""
        self.total = 0
        """Bytes that this process has to write."""
        self.written = 0
        self.error = ""
        """Why it failed; empty if it did not."""
        self._done = threading.Event()
        self._pid = os.getpid()

    def grow(self, size: int) -> None:
        self.written += size

    def end(self, error: str = "") -> None:
        self.error = error
        self._done.set()

    def make_manifest(self, files: tuple[FileEntry, ...], id: str) -> Manifest:
        """The manifest of these files, once they are all written."""
        seconds = time.monotonic() - self.began
        return msgspec.structs.replace(self.manifest, files=files, id=id, created=time.time(), seconds=seconds)

    @property
    def done(self) -> bool:
        return self._done.is_set()

    @property
    def progress(self) -> float:
        """From 0 to 1. Reaches 1 only when the checkpoint is durable."""
        if self.done:
            return 1.0
        return min(0.99, self.written / self.total) if self.total else 0.0

    def wait(self, seconds: float | None = None) -> bool:
        """Wait until it has ended, at most this long; False if it has not. A forked child does not wait."""
        return self._done.wait(seconds) if self._pid == os.getpid() else self.done

    def __repr__(self) -> str:
        how = f"failed: {self.error}" if self.error else "done" if self.done else f"{self.progress:.0%}"
        return f"<PendingSave {self.path.name} {how}>"


class SingleFileSave:
    """The state of one process, in one file."""

    layout: Literal["single", "sharded"] = "single"

    def __init__(self, saving: PendingSave, tree: Any, copier: StagingBuffers) -> None:
        self._saving = saving
        self._copier = copier
        self._copied = copier.copy(tree)
        self.size = self._copied.size

    def write(self) -> None:
        id = commit.new_id()
        draft = commit.hidden(self._saving.path.parent, "saving", self._saving.step, id)
        draft.mkdir()
        try:
            entry = torch_files.write(draft / torch_files.STATE, self._copied.tree, self._saving.grow)
            commit.commit(draft, self._saving.make_manifest((entry,), id))
        except BaseException:
            commit.remove(draft)
            raise

    def release(self) -> None:
        self._copied = StagedState()
        self._copier.release()


def describe_error(error: Exception) -> str:
    """Why a save failed, in one line."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    if isinstance(error, TorchLoomError):
        return error.message
    return f"{type(error).__name__}: {error}"


def error_class(error: Exception) -> str:
    """What errors of one kind have in common, whichever file or step they name. At most 100 characters."""
    cause = error.__cause__ if isinstance(error, TorchLoomError) else error
    code = errno.errorcode.get(cause.errno or 0, "") if isinstance(cause, OSError) else ""
    return f"OSError {code}" if code else type(error).__name__[:100]
