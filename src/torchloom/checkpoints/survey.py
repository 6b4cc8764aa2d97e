"""What is in a checkpoint folder: a cheap look at each, or every byte of it; and what is being written right now.

A cheap look reads manifests and compares sizes, so it takes no longer for large checkpoints than for small ones.
"""

from __future__ import annotations

import os
import stat
import zipfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Literal

import msgspec

from torchloom.checkpoints import foreign, search
from torchloom.checkpoints import manifest as manifests
from torchloom.checkpoints.draft import HIDDEN
from torchloom.checkpoints.locks import reading
from torchloom.checkpoints.manifest import Damaged, Manifest, folder_name
from torchloom.checkpoints.search import ASIDE, Candidate, candidates
from torchloom.messages import SavedStep

Status = Literal["complete", "valid", "damaged", "writing", "abandoned", "reported", "rolled back"]
"""Whole at a look, whole to the last bit, neither; under way, given up; only heard of; put aside by a rollback."""
ABANDONED_SECONDS = 600.0
"""What nobody has written to for so long is not being written any more."""


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """One checkpoint."""

    name: str
    step: int
    kind: str
    """`torchloom`, `torch.save`, `dcp`, `huggingface`, `lightning`; empty if it is none of them."""
    size: int
    created: float
    """Wall time."""
    seconds: float | None = None
    """How long it took to write, where that is known."""
    status: Status = "complete"
    why: str = ""
    """What is wrong with it."""
    node: str = ""
    """Who told of it, where it was only heard of."""

    @property
    def whole(self) -> bool:
        return self.status in {"complete", "valid", "reported"}


class Survey(msgspec.Struct, frozen=True, kw_only=True):
    """All of a folder, newest step first."""

    folder: str
    entries: tuple[Entry, ...]
    verified: bool = False

    @property
    def finished(self) -> list[Entry]:
        """Without what is being written, and what was put aside."""
        return [entry for entry in self.entries if entry.status not in {"writing", "abandoned", "rolled back"}]

    @property
    def resume(self) -> Entry | None:
        """The one a resume would take; certain only if all were verified."""
        return next((entry for entry in self.finished if entry.whole), None)


Watch = Callable[[Entry, int, int, int], None]
"""Told before each one is verified: which, the how-manieth, of how many, and the bytes read so far."""


def survey(
    folder: Path, now: float, pattern: str | None = None, verify: bool = False, watch: Watch = lambda *_: None
) -> Survey:
    """Everything in a folder. BadState if it cannot be read."""
    seen = [(candidate, entry) for candidate in candidates(folder, pattern) if (entry := look(candidate))]
    entries = list(_verified(seen, watch)) if verify else [entry for _, entry in seen]
    entries += [*drafts(folder, now), *put_aside(folder, pattern)]
    entries.sort(key=lambda e: e.step, reverse=True)  # stable: where a step has several, the order of a resume
    return Survey(folder=text(str(folder)), entries=tuple(entries), verified=verify)


def reported(folder: str, saved: Iterable[SavedStep]) -> Survey:
    """What was told of a folder that is not here; the latest word on a step counts."""
    latest = {save.step: save for save in saved}
    entries = tuple(
        Entry(
            name=folder_name(save.step),
            step=save.step,
            kind="torchloom",
            size=save.size,
            created=save.at,
            seconds=save.seconds,
            status="reported",
            node=save.node,
        )
        for _, save in sorted(latest.items(), reverse=True)
    )
    return Survey(folder=folder, entries=entries)


def look(candidate: Candidate) -> Entry | None:
    """Without reading what is large. None if it has been deleted meanwhile."""
    path = candidate.path
    manifest, why = None, ""
    kind = "torchloom" if candidate.ours else _foreign_kind(path)
    try:
        if path.is_symlink() and (candidate.ours or not search.leads_inside(path)):
            raise Damaged(path, "it is a link; a checkpoint is what lies in its folder")
        if candidate.ours:
            manifest = manifests.read(path)
            _compare_sizes(path, manifest)
        elif kind == "torch.save":
            _check_directory(path)
        else:
            foreign.check(path)
    except Damaged as damage:
        if not os.path.lexists(path):
            return None
        why = damage.why
    size, changed = (manifest.size, manifest.created) if manifest and not why else weigh(_real(path))
    return Entry(
        name=text(path.name),
        step=candidate.step,
        kind=kind,
        size=size,
        created=(manifest and manifest.created) or changed or weigh(path)[1],
        seconds=(manifest.seconds or None) if manifest else None,
        status="damaged" if why else "complete",
        why=text(why),
    )


def drafts(folder: Path, now: float) -> Iterator[Entry]:
    """What is being written, or was when its process ended."""
    for name in _names(folder):
        found = HIDDEN.fullmatch(name)
        if found is None or found[1] != "saving":
            continue
        size, changed = weigh(folder / name)
        if not changed:
            continue  # it has become a checkpoint, or is gone
        gone = now - changed > ABANDONED_SECONDS
        step = int(found[2].removeprefix("step-"))
        status: Status = "abandoned" if gone else "writing"
        yield Entry(name=name, step=step, kind="torchloom", size=size, created=changed, status=status)


def put_aside(folder: Path, pattern: str | None = None) -> Iterator[Entry]:
    """What training has gone back from: nothing that a resume takes."""
    for name in sorted(_names(folder)):
        if ASIDE.fullmatch(name) and (folder / name).is_dir():
            for candidate in candidates(folder / name, pattern):
                if entry := look(candidate):
                    yield msgspec.structs.replace(entry, name=f"{name}/{entry.name}", status="rolled back")


def weigh(path: Path | str) -> tuple[int, float]:
    """Bytes in a file or in all of a folder, and when it was last written to; zeros if it is not there."""
    size, changed = 0, 0.0
    try:
        top = os.lstat(path)
        if not stat.S_ISDIR(top.st_mode):
            return top.st_size, top.st_mtime
        changed = top.st_mtime
        with os.scandir(path) as entries:
            parts = [weigh(entry.path) for entry in entries]
    except OSError:
        return size, changed
    return sum(part[0] for part in parts), max([changed, *(part[1] for part in parts)])


def _verified(seen: list[tuple[Candidate, Entry]], watch: Watch) -> Iterator[Entry]:
    number, done = 0, 0
    total = sum(entry.whole for _, entry in seen)
    for candidate, entry in seen:
        if not entry.whole:
            yield entry
            continue
        number += 1
        watch(entry, number, total, done)
        try:
            with reading(candidate.path):  # or a pruning would delete it under our hands
                candidate.check()
        except Damaged as damage:
            if os.path.lexists(candidate.path):
                yield msgspec.structs.replace(entry, status="damaged", why=text(damage.why))
        else:
            yield msgspec.structs.replace(entry, status="valid")
        done += entry.size


def _names(folder: Path) -> list[str]:
    try:
        return [entry.name for entry in os.scandir(folder)]
    except OSError:
        return []


def _real(path: Path) -> Path:
    """A foreign one may be a link to its neighbour; that is what has a size."""
    return path.resolve() if path.is_symlink() and search.leads_inside(path) else path


def _foreign_kind(path: Path) -> str:
    return foreign.kind_of(path) if path.is_dir() else "torch.save"


def _compare_sizes(folder: Path, manifest: Manifest) -> None:
    """Every file a manifest names is there and as long as it should be."""
    for file in manifest.files:
        try:
            found = os.lstat(f"{folder}/{file.name}")
        except FileNotFoundError:
            raise Damaged(folder, f"{file.name} is missing") from None
        except OSError as error:
            raise Damaged(folder, f"{file.name} cannot be read: {error.strerror}") from error
        if not stat.S_ISREG(found.st_mode):
            raise Damaged(folder, f"{file.name} is not a file")
        if found.st_size != file.size:
            raise Damaged(folder, f"{file.name} has {found.st_size} bytes instead of {file.size}")


def _check_directory(path: Path) -> None:
    """The table of contents of a torch.save file, which stands at its end: one that was cut short has none."""
    try:
        if not path.is_file():  # a pipe would keep us waiting
            raise Damaged(path, "it is not a file")
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
    except (zipfile.BadZipFile, EOFError, NotImplementedError, ValueError) as error:
        raise Damaged(path, f"not a whole torch.save file: {error}") from error
    except OSError as error:
        raise Damaged(path, f"cannot be read: {error.strerror or error}") from error
    if not any(name.endswith("data.pkl") for name in names):
        raise Damaged(path, "it is an archive, but not one of torch.save")


def text(name: str) -> str:
    """A file's name need not be text; what is shown and sent is."""
    return name.encode("utf-8", "replace").decode()
