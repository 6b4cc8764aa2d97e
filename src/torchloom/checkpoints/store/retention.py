"""Deletes old checkpoints by a rule: never the last valid one, never one that is being read.

A rule keeps what any of its parts keeps: the newest ones, those younger than an age, those of every k-th step. Only
what torchLoom wrote is deleted; foreign files never are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from torchloom.checkpoints.store import commit
from torchloom.checkpoints.store import manifest as manifests
from torchloom.checkpoints.store.checksums import signature, verify
from torchloom.checkpoints.store.locks import deleting, pruning
from torchloom.checkpoints.store.search import Candidate, candidates
from torchloom.errors import BadInput, Damaged


@dataclass(frozen=True)
class Keep:
    """What to keep; nothing given keeps everything."""

    last: int | None = None
    """How many of the newest to keep."""
    hours: float | None = None
    """Keep those younger than this."""
    every: int | None = None
    """Keep those whose step is a multiple of this, without limit."""

    def __post_init__(self) -> None:
        for name, kinds in (("last", int), ("hours", (int, float)), ("every", int)):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, kinds) or not value > 0):
                what = "number" if name == "hours" else "whole number"
                raise BadInput(
                    f"keep {name}={value!r}: it must be a {what} greater than 0", hint="leave it out to keep all"
                )

    @property
    def all(self) -> bool:
        return self.last is None and self.hours is None and self.every is None


@dataclass
class Pruned:
    """The result of a pruning."""

    deleted: list[str] = field(default_factory=list)
    spared: dict[str, str] = field(default_factory=dict)
    """What the rule would have deleted, and why it was kept."""
    bytes: int = 0
    """Bytes freed."""


def select_for_deletion(ages: Mapping[int, float], keep: Keep) -> list[int]:
    """The steps that a rule does not keep, oldest first. `ages` are in seconds, negative if the clock went back."""
    if keep.all:
        return []
    newest = sorted(ages, reverse=True)[: keep.last or 0]
    return [
        step
        for step in sorted(ages)
        if step not in newest
        and not (keep.hours is not None and ages[step] < keep.hours * 3600)
        and not (keep.every is not None and step % keep.every == 0)
    ]


def prune(
    folder: Path,
    keep: Keep,
    now: float,
    trusts: Callable[[Path], bool] = lambda _: False,
    dry_run: bool = False,
    spare: int | None = None,
) -> Pruned:
    """Delete what the rule does not keep. `trusts` says that one is valid without reading it; `spare` is kept."""
    pruned = Pruned()
    if keep.all:
        return pruned
    with pruning(folder):
        ours = {c.step: c for c in candidates(folder) if c.ours and _is_finished(c)}
        ages = {step: now - _created(c) for step, c in ours.items()}
        going = [step for step in select_for_deletion(ages, keep) if step != spare]
        staying = [ours[step] for step in sorted(ours, reverse=True) if step not in going]
        if going and not any(_is_good(c, trusts) for c in staying):
            last = next((c for c in map(ours.__getitem__, reversed(going)) if _is_good(c, trusts)), None)
            if last is None:
                pruned.spared = {ours[step].path.name: "none of them is whole" for step in going}
                return pruned
            pruned.spared[last.path.name] = "it is the last good one"
            going.remove(last.step)
        for step in going:
            _delete(ours[step], pruned, dry_run)
    return pruned


def _delete(candidate: Candidate, pruned: Pruned, dry_run: bool) -> None:
    path = candidate.path
    with deleting(path) as free:
        if not free:
            pruned.spared[path.name] = "it is being read"
            return
        size = sum(file[2] for file in signature(path))
        try:
            if not dry_run:
                commit.delete(path, candidate.step)
        except OSError as error:
            pruned.spared[path.name] = f"cannot be deleted: {error.strerror or error}"
            return
        pruned.deleted.append(path.name)
        pruned.bytes += size


def _is_finished(candidate: Candidate) -> bool:
    """Whether it was committed. Anything without a manifest is foreign, or needs a decision by a person."""
    return not candidate.path.is_symlink() and (candidate.path / manifests.NAME).exists()


def _is_good(candidate: Candidate, trusts: Callable[[Path], bool]) -> bool:
    if trusts(candidate.path):
        return True
    try:
        verify(candidate.path)
    except Damaged:
        return False
    return True


def _created(candidate: Candidate) -> float:
    try:
        return manifests.read(candidate.path).created
    except Damaged:
        return 0.0
