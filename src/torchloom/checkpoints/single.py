"""The state of one process in one file, as torch.save writes it: whoever has torch can read it without us."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, Literal, Protocol

import torch

from torchloom.checkpoints import draft
from torchloom.checkpoints.copying import Copied, Copier
from torchloom.checkpoints.manifest import Damaged, FileEntry, Manifest
from torchloom.checkpoints.sink import Sink

FILE: Final = "state.pt"
Seal = Callable[[tuple[FileEntry, ...], str], Manifest]
"""Makes the manifest of these files, with this id."""


class Prepared(Protocol):
    """A save: copied out when it was made, written when write() is called, on whatever thread."""

    layout: Literal["single", "sharded"]
    size: int

    def write(self, grown: Callable[[int], None], seal: Seal) -> None:
        """Until it is durable and in its place, or an error."""

    def release(self) -> None:
        """Its buffers may be used again."""


class SingleSave:
    layout: Literal["single", "sharded"] = "single"

    def __init__(self, folder: Path, step: int, tree: Any, copier: Copier) -> None:
        self._folder = folder
        self._step = step
        self._copier = copier
        self._copied: Copied | None = copier.copy(tree)
        self.size = self._copied.size

    def write(self, grown: Callable[[int], None], seal: Seal) -> None:
        id = draft.new_id()
        folder = draft.begin(self._folder, self._step, id)
        try:
            assert self._copied is not None
            entry = write(folder / FILE, self._copied.tree, grown)
            draft.commit(folder, seal((entry,), id))
        except BaseException:
            draft.discard(folder)
            raise

    def release(self) -> None:
        self._copied = None
        self._copier.release()


def write(path: Path, tree: Any, grown: Callable[[int], None] = lambda _: None) -> FileEntry:
    """Write it, and make it durable."""
    with Sink(path, grown) as sink:
        try:
            torch.save(tree, sink)
        except Exception:
            if sink.error is not None:
                raise sink.error from None  # torch tells it as a position that is not where it should be
            raise
        return sink.finish()


def read(path: Path) -> Any:
    """What a torch.save file holds, as data alone: nothing in it is run."""
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=False)
    except OSError as error:
        raise Damaged(path, f"it cannot be read: {error.strerror or error}") from error
    except Exception as error:  # whatever a damaged or hostile pickle leads to
        raise Damaged(path, f"torch.load refuses it: {first_line(error)}") from error


def first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)[:300]
