"""Going back to before a step: what was saved since is put aside, so that no later start goes on from it.

    step-90                      training goes on from here
    rolled-back-1/step-100       no search finds it, no retention counts or deletes it
    rolled-back-1/rollback.json  what it was put aside for

Names stay as they were, also of what others wrote, one folder deeper: whoever wants one back moves it there. The note
is written before anything is moved. Asked for the same rollback again, by an agent that was killed in between, what it
says is finished and nothing is gone back further.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import msgspec

from torchloom.checkpoints.draft import sync_folder, write_durably
from torchloom.checkpoints.locks import WriterLock, pruning
from torchloom.checkpoints.manifest import Damaged
from torchloom.checkpoints.search import ASIDE, Candidate, Found, NoValidCheckpoint, candidates
from torchloom.errors import TorchLoomError

NOTE: Final = "rollback.json"
_here = threading.Lock()
"""One at a time in this process: the writer's lock holds others off, and not another thread."""


class Note(msgspec.Struct, frozen=True, kw_only=True):
    """In the folder of what was put aside."""

    of: str
    """Which rollback it was."""
    before: int
    chosen: str = ""
    """What training went on from; empty: from the beginning."""
    rejected: dict[str, str] = {}


@dataclass(frozen=True)
class RolledBack:
    found: Found | None
    """What to go on from; None: from the beginning."""
    rejected: dict[str, str] = field(default_factory=dict)
    """Those before the step that are not whole, and why."""
    aside: tuple[str, ...] = ()
    """Where what was saved since is now."""


class NothingBefore(TorchLoomError):
    """There was a checkpoint before the step once; to begin anew would lose more than was asked for."""

    exit_code = 8

    def __init__(self, folder: Path, before: int) -> None:
        super().__init__(
            f"a checkpoint before step {before} was saved into {folder}, and there is none any more",
            hint="keep more of them; to begin anew, move what is there away and start the job again",
        )


def roll_back(
    folder: Path, of: str, before: int, back: int = 1, pattern: str | None = None, *, job: str = "", saved: bool = False
) -> RolledBack:
    """Take the `back`-th newest that is whole of those before a step, or the oldest where there are not so many.

    `of` names the rollback. `saved` says that there must be one: without it, where there is nothing to go back to,
    training begins anew. NoValidCheckpoint if there are some and none is whole.
    """
    ours = any(candidate.ours for candidate in candidates(folder, pattern))
    with _here, _alone(folder, job) if ours else contextlib.nullcontext():
        known = candidates(folder, pattern)
        note = next((note for _, note in notes(folder) if note.of == of), None)
        if note is None:
            note = _choose(folder, known, Note(of=of, before=before), back, saved)
        chosen = next((candidate for candidate in known if candidate.path.name == note.chosen), None)
        if note.chosen and chosen is None:
            raise NothingBefore(folder, before)
        found = chosen.check() if chosen is not None else None
        newer = [c for c in known if c.step > (-1 if chosen is None else chosen.step)]
        aside = _put_aside(folder, newer, note) if newer else ()
        return RolledBack(found, note.rejected, aside)


def _choose(folder: Path, known: list[Candidate], note: Note, back: int, saved: bool) -> Note:
    rejected: dict[str, str] = {}
    chosen, left = "", back
    for candidate in known:
        if candidate.step < note.before and left:
            try:
                chosen, left = candidate.check().path.name, left - 1
            except Damaged as damage:
                rejected[candidate.path.name] = damage.why
    if not chosen and rejected:
        raise NoValidCheckpoint(folder, rejected)
    if not chosen and saved:
        raise NothingBefore(folder, note.before)
    return msgspec.structs.replace(note, chosen=chosen, rejected=rejected)


@contextlib.contextmanager
def _alone(folder: Path, job: str) -> Iterator[None]:
    """Nobody writes into the folder, nobody deletes in it. AlreadyUp if another job writes there."""
    lock = WriterLock(folder, job)
    try:
        with pruning(folder):
            yield
    finally:
        lock.release()


def _put_aside(folder: Path, newer: list[Candidate], note: Note) -> tuple[str, ...]:
    place = next((path for path, known in notes(folder) if known.of == note.of), None)
    if place is None:
        numbers = [int(named[1]) for entry in os.scandir(folder) if (named := ASIDE.fullmatch(entry.name))]
        place = folder / f"rolled-back-{max(numbers, default=0) + 1}"
        place.mkdir()
        write_durably(place / NOTE, msgspec.json.encode(note))
        sync_folder(place)
    moved = []
    for candidate in newer:
        target = place / candidate.path.name
        while os.path.lexists(target):  # the same step, saved anew since
            target = target.with_name(f"{target.name}-again")
        candidate.path.rename(target)
        moved.append(f"{place.name}/{target.name}")
    sync_folder(place)
    sync_folder(folder)
    return tuple(moved)


def notes(folder: Path) -> list[tuple[Path, Note]]:
    """The folders of what was put aside, the latest first, each with what for. One that does not tell is left out."""
    found = []
    for entry in os.scandir(folder):
        named = ASIDE.fullmatch(entry.name)
        if named and entry.is_dir(follow_symlinks=False):
            with contextlib.suppress(OSError, msgspec.MsgspecError):
                note = msgspec.json.decode((Path(entry.path) / NOTE).read_bytes(), type=Note)
                found.append((int(named[1]), Path(entry.path), note))
    return [(path, note) for _, path, note in sorted(found, key=lambda one: -one[0])]
