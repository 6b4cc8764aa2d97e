"""Which checkpoints to keep, and deleting the others: never the last good one, never one that is being read.

A rule keeps what any of its parts keeps: the newest so many, those younger than so many hours, every k-th step for
ever. Only what torchLoom wrote is deleted; foreign files never are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from torchloom.checkpoints import draft
from torchloom.checkpoints import manifest as manifests
from torchloom.checkpoints.locks import deleting, pruning
from torchloom.checkpoints.manifest import Damaged
from torchloom.checkpoints.search import Candidate, candidates
from torchloom.checkpoints.verify import signature, verify
from torchloom.errors import BadInput


@dataclass(frozen=True)
class Keep:
    """What to keep; nothing given keeps everything."""

    last: int | None = None
    """The newest so many."""
    hours: float | None = None
    """Those younger than this."""
    every: int | None = None
    """Those whose step is a multiple of this, for ever."""

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
    """What became of a pruning."""

    deleted: list[str] = field(default_factory=list)
    spared: dict[str, str] = field(default_factory=dict)
    """What the rule would have deleted, and why it was not."""
    bytes: int = 0
    """Freed."""


def doomed(ages: Mapping[int, float], keep: Keep) -> list[int]:
    """The steps a rule does not keep, oldest first. `ages` are in seconds; a clock that went back makes them young."""
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
    """Delete what the rule does not keep. `trusts` says of one that it is good without reading it; `spare` stays."""
    pruned = Pruned()
    if keep.all:
        return pruned
    with pruning(folder):
        ours = {c.step: c for c in candidates(folder) if c.ours and _is_finished(c)}
        ages = {step: now - _created(c) for step, c in ours.items()}
        going = [step for step in doomed(ages, keep) if step != spare]
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
                draft.delete(path, candidate.step)
        except OSError as error:
            pruned.spared[path.name] = f"cannot be deleted: {error.strerror or error}"
            return
        pruned.deleted.append(path.name)
        pruned.bytes += size


def _is_finished(candidate: Candidate) -> bool:
    """Whether it was committed once. What has no manifest was not written by us, or is for people to look at."""
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
