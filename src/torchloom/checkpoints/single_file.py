"""The state of one process in one file, as torch.save writes it: torch can read it without torchLoom."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, Literal

import torch

from torchloom.checkpoints.pending_save import PendingSave
from torchloom.checkpoints.staging import StagedState, StagingBuffers
from torchloom.checkpoints.store import commit
from torchloom.checkpoints.store.checksums import ChecksummedFile
from torchloom.checkpoints.store.manifest import FileEntry
from torchloom.errors import Damaged

FILE: Final = "state.pt"


class SingleFileSave:
    layout: Literal["single", "sharded"] = "single"

    def __init__(self, folder: Path, step: int, tree: Any, copier: StagingBuffers) -> None:
        self._folder = folder
        self._step = step
        self._copier = copier
        self._copied: StagedState | None = copier.copy(tree)
        self.size = self._copied.size

    def write(self, saving: PendingSave) -> None:
        id = commit.new_id()
        draft = commit.hidden(self._folder, "saving", self._step, id)
        draft.mkdir()
        try:
            assert self._copied is not None
            entry = write(draft / FILE, self._copied.tree, saving.grow)
            commit.commit(draft, saving.make_manifest((entry,), id))
        except BaseException:
            commit.remove(draft)
            raise

    def release(self) -> None:
        self._copied = None
        self._copier.release()


def write(path: Path, tree: Any, grown: Callable[[int], None] = lambda _: None) -> FileEntry:
    """Write a tree with torch.save, and make it durable."""
    with ChecksummedFile(path, grown) as sink:
        torch.save(tree, sink)
        return sink.finish()


def read(path: Path) -> Any:
    """The contents of a torch.save file, without running any code in it."""
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=False)
    except OSError as error:
        raise Damaged(path, f"it cannot be read: {error.strerror or error}") from error
    except Exception as error:  # whatever a damaged or hostile pickle leads to
        raise Damaged(path, f"torch.load refuses it: {first_line(error)}") from error


def first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)[:300]
