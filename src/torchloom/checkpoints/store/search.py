"""Finds the newest valid checkpoint. An invalid one is reported with the reason and left in place."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from torchloom.checkpoints.store import foreign_formats
from torchloom.checkpoints.store.checksums import Signature, signature, verify
from torchloom.checkpoints.store.manifest import FOLDER, Manifest
from torchloom.errors import BadState, Damaged, NoValidCheckpoint

ASIDE = re.compile(r"rolled-back-(\d{1,9})")
"""A folder of checkpoints that a rollback has put aside: not candidates for a resume."""


@dataclass(frozen=True)
class ValidCheckpoint:
    """A valid checkpoint."""

    step: int
    path: Path
    kind: str
    """`torchloom`, or the kind of a foreign checkpoint."""
    manifest: Manifest | None = None
    signature: Signature = ()
    """The signature of its files before they were verified, to detect later changes."""
    rejected: Mapping[str, str] = field(default_factory=dict)
    """Newer checkpoints that are not valid, and why."""

    def check_unchanged(self) -> None:
        """Check that the files have not changed since they were verified."""
        if self.signature and signature(self.path) != self.signature:
            raise Damaged(self.path, "it was changed while it was read")


@dataclass(frozen=True)
class Candidate:
    """Something that looks like a checkpoint."""

    step: int
    path: Path
    ours: bool

    def check_link(self) -> None:
        if self.path.is_symlink() and (self.ours or not leads_inside(self.path)):
            raise Damaged(self.path, "it is a link; a checkpoint is what lies in its folder")

    def check(self) -> ValidCheckpoint:
        """Verify every byte of it; raises Damaged."""
        self.check_link()
        if self.ours:
            before = signature(self.path)
            return ValidCheckpoint(self.step, self.path, "torchloom", verify(self.path), before)
        return ValidCheckpoint(self.step, self.path, foreign_formats.check(self.path))


def leads_inside(link: Path) -> bool:
    """Whether a link (`last.ckpt`) points at a neighbour."""
    return link.resolve().parent == link.parent.resolve()


def scan(folder: Path) -> list[os.DirEntry[str]]:
    """What the folder contains; raises BadState if it cannot be read."""
    try:
        return list(os.scandir(folder))
    except FileNotFoundError:
        raise BadState(f"the folder {folder} does not exist", hint="is the path right?") from None
    except OSError as error:
        raise BadState(f"the folder {folder} cannot be read: {error.strerror}") from error


def rolled_back_folders(folder: Path) -> list[tuple[int, Path]]:
    """The folders of checkpoints that were put aside, with their numbers, latest first."""
    matches = ((ASIDE.fullmatch(entry.name), Path(entry.path)) for entry in scan(folder))
    return sorted(((int(match[1]), path) for match, path in matches if match), reverse=True)


def candidates(folder: Path, pattern: str | None = None) -> list[Candidate]:
    """Everything that looks like a checkpoint, newest first. The number in the name decides, not the clock."""
    expression = _compile(pattern)
    matches = sorted(_looks(scan(folder), expression), key=lambda c: (c.step, c.ours, c.path.name), reverse=True)
    ours = [candidate for candidate in matches if candidate.ours]
    return ours if ours and expression is None else matches  # files beside torchLoom's checkpoints are not checkpoints


def _looks(entries: list[os.DirEntry[str]], expression: re.Pattern[str] | None) -> Iterator[Candidate]:
    for entry in entries:
        path = Path(entry.path)
        ours = FOLDER.fullmatch(entry.name)
        if ASIDE.fullmatch(entry.name):
            continue
        if ours and entry.is_dir():
            yield Candidate(int(ours[1]), path, ours=True)
        elif expression is not None:
            match = expression.fullmatch(entry.name)
            if match:
                yield Candidate(int(match[1]), path, ours=False)
        elif (step := foreign_formats.step_of(path)) is not None:
            yield Candidate(step, path, ours=False)


def _compile(pattern: str | None) -> re.Pattern[str] | None:
    """`checkpoint_step_{step}.pt` as a regular expression."""
    if pattern is None:
        return None
    before, brace, after = pattern.partition("{step}")
    if not brace:
        raise BadState(f"the pattern {pattern!r} does not say where the step stands", hint="checkpoint_step_{step}.pt")
    return re.compile(re.escape(before) + r"(\d{1,18})" + re.escape(after))


def latest(folder: Path, pattern: str | None = None) -> ValidCheckpoint:
    """The newest valid checkpoint, and why newer ones were rejected; NoValidCheckpoint if there is none."""
    rejected: dict[str, str] = {}
    for candidate in candidates(folder, pattern):
        try:
            return replace(candidate.check(), rejected=rejected)
        except Damaged as damage:
            rejected[candidate.path.name] = damage.why
    raise NoValidCheckpoint(folder, rejected)


def at_step(folder: Path, step: int, pattern: str | None = None) -> ValidCheckpoint:
    """The checkpoint of one step. Raises Damaged if it is not valid, BadState if there is none."""
    all_candidates = candidates(folder, pattern)
    for candidate in all_candidates:
        if candidate.step == step:
            return candidate.check()
    steps = ", ".join(str(candidate.step) for candidate in all_candidates[:5])
    raise BadState(f"there is no checkpoint of step {step} in {folder}", hint=f"there are {steps}" if steps else "")
