"""Lists a checkpoint folder: finished checkpoints, checked quickly or verified byte by byte, and those being written.

The quick check reads manifests and compares sizes, so it takes no longer for large checkpoints than for small ones.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Literal

import msgspec

from torchloom.checkpoints.store import foreign_formats
from torchloom.checkpoints.store import manifest as manifests
from torchloom.checkpoints.store.checksums import check_sizes
from torchloom.checkpoints.store.commit import HIDDEN
from torchloom.checkpoints.store.locks import reading
from torchloom.checkpoints.store.search import Candidate, candidates, leads_inside, rolled_back_folders, scan
from torchloom.errors import Damaged
from torchloom.protocol.views import SavedStep

Status = Literal["complete", "valid", "damaged", "writing", "abandoned", "reported", "rolled back"]
"""Passed the quick check, verified, damaged; being written, abandoned; only reported; put aside by a rollback."""
ABANDONED_SECONDS = 600.0
"""A hidden folder that was not written to for this long is abandoned."""


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
    """How long it took to write, if known."""
    status: Status = "complete"
    why: str = ""
    """What is wrong with it."""
    node: str = ""
    """The replica that reported it, if it was only reported."""

    @property
    def whole(self) -> bool:
        return self.status in {"complete", "valid", "reported"}


class Inventory(msgspec.Struct, frozen=True, kw_only=True):
    """All checkpoints of a folder, newest step first."""

    folder: str
    entries: tuple[Entry, ...]
    verified: bool = False

    @property
    def finished(self) -> list[Entry]:
        """Without those being written, and those put aside."""
        return [entry for entry in self.entries if entry.status not in {"writing", "abandoned", "rolled back"}]

    @property
    def resume(self) -> Entry | None:
        """The checkpoint that a resume would take; certain only if all were verified."""
        return next((entry for entry in self.finished if entry.whole), None)


OnVerify = Callable[[Entry, int, int, int], None]
"""Called before each one is verified: its name, its position, the total number, and the bytes read so far."""


def take_inventory(
    folder: Path, now: float, pattern: str | None = None, verify: bool = False, on_verify: OnVerify = lambda *_: None
) -> Inventory:
    """List a folder. Raises BadState if it cannot be read."""
    listing = [(candidate, entry) for candidate in candidates(folder, pattern) if (entry := look(candidate))]
    entries = list(_verified(listing, on_verify)) if verify else [entry for _, entry in listing]
    entries += [*drafts(folder, now), *put_aside(folder, pattern)]
    entries.sort(key=lambda e: e.step, reverse=True)  # stable: where a step has several, the order of a resume
    return Inventory(folder=text(str(folder)), entries=tuple(entries), verified=verify)


def inventory_from_reports(folder: str, saved: Iterable[SavedStep]) -> Inventory:
    """The inventory of a folder on another machine, from reports; the latest report on a step counts."""
    latest = {save.step: save for save in saved}
    entries = tuple(
        Entry(
            name=manifests.folder_name(save.step),
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
    return Inventory(folder=folder, entries=entries)


def look(candidate: Candidate) -> Entry | None:
    """The quick check. None if it was deleted in the meantime."""
    path = candidate.path
    manifest, why = None, ""
    kind = "torchloom" if candidate.ours else foreign_formats.kind_of(path)
    try:
        candidate.check_link()
        if candidate.ours:
            manifest = manifests.read(path)
            check_sizes(path, manifest)
        else:
            foreign_formats.check(path, quick=True)
    except Damaged as damage:
        if not os.path.lexists(path):
            return None
        why = damage.why
    real = path.resolve() if path.is_symlink() and leads_inside(path) else path  # of a link to its neighbour
    size, changed = (manifest.size, manifest.created) if manifest and not why else weigh(real)
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
    """Checkpoints being written, or left incomplete when their process ended."""
    for draft in scan(folder):
        match = HIDDEN.fullmatch(draft.name)
        if match is None or match[1] != "saving":
            continue
        size, changed = weigh(draft.path)
        if not changed:
            continue  # it has become a checkpoint, or is gone
        step = int(match[2].removeprefix("step-"))
        status: Status = "abandoned" if now - changed > ABANDONED_SECONDS else "writing"
        yield Entry(name=draft.name, step=step, kind="torchloom", size=size, created=changed, status=status)


def put_aside(folder: Path, pattern: str | None = None) -> Iterator[Entry]:
    """Checkpoints that rollbacks have put aside, which a resume does not take."""
    for _, place in rolled_back_folders(folder):
        for candidate in candidates(place, pattern) if place.is_dir() else ():
            if entry := look(candidate):
                yield msgspec.structs.replace(entry, name=f"{place.name}/{entry.name}", status="rolled back")


def weigh(path: Path | str) -> tuple[int, float]:
    """Bytes in a file or in all of a folder, and when it was last written to; zeros if it does not exist."""
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


def _verified(listing: list[tuple[Candidate, Entry]], on_verify: OnVerify) -> Iterator[Entry]:
    number, done = 0, 0
    total = sum(entry.whole for _, entry in listing)
    for candidate, entry in listing:
        if not entry.whole:
            yield entry
            continue
        number += 1
        on_verify(entry, number, total, done)
        try:
            with reading(candidate.path):  # otherwise retention could delete it meanwhile
                candidate.check()
        except Damaged as damage:
            if os.path.lexists(candidate.path):
                yield msgspec.structs.replace(entry, status="damaged", why=text(damage.why))
        else:
            yield msgspec.structs.replace(entry, status="valid")
        done += entry.size


def text(name: str) -> str:
    """A file's name as valid text, which a file's name need not be."""
    return name.encode("utf-8", "replace").decode()
