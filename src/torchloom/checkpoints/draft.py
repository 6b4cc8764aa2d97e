"""A checkpoint while it is being written: a hidden folder beside the finished ones, which becomes one by a rename.

.saving-step-N-ID    being written; of no use to anyone
step-N               complete: the rename happens after everything in it is durable
.old-step-N-ID       a checkpoint of the same step that was replaced, on its way out
.deleting-step-N-ID  deleted by retention, on its way out
"""

from __future__ import annotations

import ctypes
import errno
import os
import re
import secrets
import shutil
import sys
from pathlib import Path
from typing import Final

from torchloom.checkpoints import manifest as manifests
from torchloom.checkpoints.manifest import FOLDER, Manifest, folder_name

HIDDEN = re.compile(r"\.(saving|old|deleting)-(step-\d{1,18})-[0-9a-f]{8}")
_EXCHANGE: Final = 2
_AT_FDCWD: Final = -100


def hidden(folder: Path, what: str, step: int) -> Path:
    return folder / f".{what}-{folder_name(step)}-{new_id()}"


def begin(folder: Path, step: int, id: str) -> Path:
    """A hidden folder to write into."""
    draft = path_of(folder, step, id)
    draft.mkdir()
    return draft


def path_of(folder: Path, step: int, id: str) -> Path:
    return folder / f".saving-{folder_name(step)}-{id}"


def new_id() -> str:
    return secrets.token_hex(4)


def commit(draft: Path, manifest: Manifest) -> Path:
    """All files of the draft are durable: seal it, and let it take its place at once and as a whole."""
    write_durably(draft / manifests.NAME, manifests.encode(manifest))
    sync_folder(draft)
    final = draft.parent / folder_name(manifest.step)
    try:
        draft.rename(final)
    except OSError as error:
        if error.errno not in {errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR}:
            raise
        if final.is_symlink() or not (final / manifests.NAME).exists():
            final.rename(_aside(final))  # not ours: out of the way, and not deleted
            draft.rename(final)
        else:
            old = _replace(draft, final, manifest.step)
            sync_folder(draft.parent)
            _remove(old)
    sync_folder(draft.parent)
    return final


def discard(draft: Path) -> None:
    """It will not become one."""
    shutil.rmtree(draft, ignore_errors=True)


def delete(checkpoint: Path, step: int) -> None:
    """Gone at once for whoever looks, then in fact."""
    doomed = hidden(checkpoint.parent, "deleting", step)
    checkpoint.rename(doomed)
    sync_folder(doomed.parent)
    _remove(doomed)


def set_aside(folder: Path, newer_than: int) -> list[str]:
    """Training goes back to a step: what came after it is no longer ahead, but it is not deleted either."""
    moved = []
    for entry in list(os.scandir(folder)):
        named = FOLDER.fullmatch(entry.name)
        if named and int(named[1]) > newer_than and entry.is_dir(follow_symlinks=False):
            Path(entry.path).rename(_aside(Path(entry.path)))
            moved.append(entry.name)
    return sorted(moved)


def _aside(path: Path) -> Path:
    return path.with_name(f"abandoned-{path.name}-{new_id()}")


def clean(folder: Path) -> list[str]:
    """Remove what processes that are gone left behind. Only for whoever holds the writer's lock."""
    removed = []
    for entry in list(os.scandir(folder)):
        name = HIDDEN.fullmatch(entry.name)
        if name is None:
            continue
        path = Path(entry.path)
        final = folder / name[2]
        if name[1] == "old" and not os.path.lexists(final):
            path.rename(final)  # it was killed between the two renames of a filesystem that cannot swap
        else:
            _remove(path)
            removed.append(entry.name)
    return removed


def _remove(path: Path) -> None:
    if path.is_symlink() or not path.is_dir():
        path.unlink(missing_ok=True)
    else:
        shutil.rmtree(path, ignore_errors=True)


def _replace(draft: Path, final: Path, step: int) -> Path:
    """A checkpoint of that step exists: swap the two. Where the old one is now."""
    if _swap(draft, final):
        return draft
    old = hidden(final.parent, "old", step)
    final.rename(old)
    try:
        draft.rename(final)
    except OSError:
        old.rename(final)
        raise
    return old


def _swap(one: Path, other: Path) -> bool:
    """Exchange two names in one act, where the system can: at no instant is there neither."""
    if sys.platform != "linux":
        return False
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if renameat2 is None:
        return False
    done: int = renameat2(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _EXCHANGE)
    return done == 0


def write_durably(path: Path, data: bytes) -> None:
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    try:
        with memoryview(data) as view:
            written = 0
            while written < len(data):
                written += os.write(file, view[written:])
        os.fsync(file)
    finally:
        os.close(file)


def sync_folder(folder: Path) -> None:
    """A name is durable when its folder is."""
    file = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(file)
    finally:
        os.close(file)
