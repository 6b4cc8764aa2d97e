"""Rolls back to before a step: later checkpoints are put aside, so that no later start resumes from them.

    step-90                      training continues from here
    rolled-back-1/step-100       no search finds it, retention neither counts nor deletes it
    rolled-back-1/rollback.json  why it was put aside

Names stay the same, also of foreign checkpoints, one folder deeper, so that users can move them back. The note is
written before anything is moved. If the same rollback is requested again, by an agent that was killed in between, the
one in the note is completed, and training does not go back any further.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Final

import msgspec

from torchloom.checkpoints.store.locks import WriterLock, pruning
from torchloom.checkpoints.store.search import Candidate, ValidCheckpoint, candidates, rolled_back_folders
from torchloom.errors import Damaged, NoValidCheckpoint, TorchLoomError
from torchloom.shared.files import sync_folder, write_durably
from torchloom.shared.json_decoding import decoder

NOTE: Final = "rollback.json"
_here = threading.Lock()
"""One rollback at a time in this process: the writer's lock excludes other processes, not threads."""


class Note(msgspec.Struct, frozen=True, kw_only=True):
    """The note in a folder of checkpoints that were put aside."""

    of: str
    """Identifies the rollback."""
    before: int
    chosen: str = ""
    """The checkpoint that training continued from; empty: from the start."""
    rejected: dict[str, str] = {}


class NothingBefore(TorchLoomError):
    """There was a checkpoint before the step once; starting over would lose more than requested."""

    exit_code = 8

    def __init__(self, folder: Path, before: int) -> None:
        super().__init__(
            f"a checkpoint before step {before} was saved into {folder}, and there is none any more",
            hint="keep more checkpoints; to start from the beginning, move the others away and start the job again",
        )


def roll_back(
    folder: Path, of: str, before: int, back: int = 1, pattern: str | None = None, *, job: str = "", saved: bool = False
) -> ValidCheckpoint | None:
    """Take the `back`-th newest valid checkpoint before a step, or the oldest if there are fewer; None: from the start.

    `of` identifies the rollback. `saved` says that there must be a checkpoint; without it, if there is none, training
    starts from the beginning. Raises NoValidCheckpoint if there are some but none is valid.
    """
    ours = any(candidate.ours for candidate in candidates(folder, pattern))
    with _here, _alone(folder, job) if ours else contextlib.nullcontext():
        all_candidates = candidates(folder, pattern)
        note = next((note for _, note in notes(folder) if note.of == of), None)
        if note is None:
            note = _choose(folder, all_candidates, Note(of=of, before=before), back, saved)
        chosen = next((candidate for candidate in all_candidates if candidate.path.name == note.chosen), None)
        if note.chosen and chosen is None:
            raise NothingBefore(folder, before)
        checkpoint = replace(chosen.check(), rejected=note.rejected) if chosen is not None else None
        newer = [c for c in all_candidates if c.step > (-1 if chosen is None else chosen.step)]
        if newer:
            _put_aside(folder, newer, note)
        return checkpoint


def _choose(folder: Path, all_candidates: list[Candidate], note: Note, back: int, saved: bool) -> Note:
    rejected: dict[str, str] = {}
    chosen, left = "", back
    for candidate in all_candidates:
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
    """Exclude writers and retention. Raises AlreadyUp if another job writes there."""
    with contextlib.closing(WriterLock(folder, job)), pruning(folder):
        yield


def _put_aside(folder: Path, newer: list[Candidate], note: Note) -> None:
    place = next((path for path, other in notes(folder) if other.of == note.of), None)
    if place is None:
        number = max((number for number, _ in rolled_back_folders(folder)), default=0) + 1
        place = folder / f"rolled-back-{number}"
        place.mkdir()
        write_durably(place / NOTE, msgspec.json.encode(note))
        sync_folder(place)
    for candidate in newer:
        target = place / candidate.path.name
        while os.path.lexists(target):  # the same step, saved again since
            target = target.with_name(f"{target.name}-again")
        candidate.path.rename(target)
    sync_folder(place)
    sync_folder(folder)


def notes(folder: Path) -> list[tuple[Path, Note]]:
    """The folders of checkpoints that were put aside, latest first, with their notes; those without are left out."""
    noted = []
    for _, path in rolled_back_folders(folder):
        with contextlib.suppress(OSError, msgspec.MsgspecError):
            if not path.is_symlink():
                noted.append((path, decoder(Note)((path / NOTE).read_bytes())))
    return noted
