"""Commits a checkpoint atomically: it is written into a hidden folder, which is renamed when it is complete.

.saving-step-N-ID    being written; not usable
step-N               complete: the rename happens after everything in it is durable
.old-step-N-ID       a replaced checkpoint of the same step, being deleted
.deleting-step-N-ID  deleted by retention, being removed
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import re
import secrets
import shutil
import sys
from pathlib import Path
from typing import Final, Literal

from torchloom.checkpoints.store import manifest as manifests
from torchloom.shared.files import sync_folder, write_durably

HIDDEN = re.compile(r"\.(saving|old|deleting)-(step-\d{1,18})-[0-9a-f]{8}")
_EXCHANGE: Final = 2
_AT_FDCWD: Final = -100


def hidden(folder: Path, what: Literal["saving", "old", "deleting"], step: int, id: str) -> Path:
    return folder / f".{what}-{manifests.folder_name(step)}-{id}"


def new_id() -> str:
    return secrets.token_hex(4)


def commit(draft: Path, manifest: manifests.Manifest) -> Path:
    """Write the manifest and rename the hidden folder into place; all its files must be durable."""
    write_durably(draft / manifests.NAME, manifests.encode(manifest))
    sync_folder(draft)
    final = draft.parent / manifests.folder_name(manifest.step)
    try:
        draft.rename(final)
    except OSError as error:
        if error.errno not in {errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR}:
            raise
        if final.is_symlink() or not (final / manifests.NAME).exists():
            final.rename(_aside(final))  # not written by torchLoom: moved out of the way, not deleted
            draft.rename(final)
        else:
            old = _replace(draft, final, manifest.step)
            sync_folder(draft.parent)
            remove(old)
    sync_folder(draft.parent)
    return final


def delete(checkpoint: Path, step: int) -> None:
    """Delete a checkpoint: it disappears from listings at once, then its files are removed."""
    doomed = hidden(checkpoint.parent, "deleting", step, new_id())
    checkpoint.rename(doomed)
    sync_folder(doomed.parent)
    remove(doomed)


def set_aside(folder: Path, newer_than: int) -> list[str]:
    """Rename checkpoints after a step that training goes back to, so that they are not found; they are not deleted."""
    moved = []
    for entry in list(os.scandir(folder)):
        match = manifests.FOLDER.fullmatch(entry.name)
        if match and int(match[1]) > newer_than and entry.is_dir(follow_symlinks=False):
            Path(entry.path).rename(_aside(Path(entry.path)))
            moved.append(entry.name)
    return sorted(moved)


def _aside(path: Path) -> Path:
    return path.with_name(f"abandoned-{path.name}-{new_id()}")


def clean(folder: Path) -> list[str]:
    """Remove what ended processes left behind. The caller must hold the writer's lock."""
    removed = []
    for entry in list(os.scandir(folder)):
        name = HIDDEN.fullmatch(entry.name)
        if name is None:
            continue
        path = Path(entry.path)
        final = folder / name[2]
        if name[1] == "old" and not os.path.lexists(final):
            path.rename(final)  # killed between two renames, on a filesystem that cannot exchange names
        else:
            remove(path)
            removed.append(entry.name)
    return removed


def remove(path: Path) -> None:
    """Remove a hidden folder, or what stands in its place, as far as that is possible. Never raises."""
    with contextlib.suppress(OSError):
        if path.is_symlink() or not path.is_dir():
            path.unlink()
        else:
            shutil.rmtree(path, ignore_errors=True)


def _replace(draft: Path, final: Path, step: int) -> Path:
    """Exchange the hidden folder with an existing checkpoint of that step; returns the new path of the old one."""
    if _swap(draft, final):
        return draft
    old = hidden(final.parent, "old", step, new_id())
    final.rename(old)
    try:
        draft.rename(final)
    except OSError:
        old.rename(final)
        raise
    return old


def _swap(one: Path, other: Path) -> bool:
    """Exchange two names atomically, if the system supports it."""
    if sys.platform != "linux":
        return False
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if renameat2 is None:
        return False
    done: int = renameat2(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _EXCHANGE)
    return done == 0
