"""Going on from a checkpoint that was found whole: read everything, on every rank; only then change anything."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torchloom.checkpoints import objects, single
from torchloom.checkpoints.manifest import Damaged, Manifest
from torchloom.checkpoints.search import Found
from torchloom.checkpoints.team import Team, together
from torchloom.checkpoints.verify import signature
from torchloom.errors import BadState

logger = logging.getLogger("torchloom")


@dataclass(frozen=True)
class Loaded:
    """A checkpoint as data."""

    step: int
    path: Path
    state: dict[str, Any]
    """Under the names it was saved with."""
    manifest: Manifest | None = None
    """None for a foreign one."""
    rejected: Mapping[str, str] = field(default_factory=dict)
    """Newer ones that are not whole, and why."""


def load(found: Found, strict: bool) -> Loaded:
    """All of it, in this process."""
    manifest = found.manifest
    if manifest is None:
        state = _foreign(found)
    elif manifest.layout == "single":
        state = single.read(found.path / single.FILE)["state"]
    else:
        from torchloom.checkpoints.gathering import assemble

        state = assemble(found.path, manifest, strict)
    check_unchanged(found)
    return Loaded(found.step, found.path, state, manifest, found.rejected)


def resume(found: Found, state: Mapping[str, Any], strict: bool, team: Team) -> dict[str, Any]:
    """Give each object what was saved for it; what belongs to this rank (`rng`, `torchloom`)."""
    with together(team):
        missing, extra = objects.check_parts(_parts(found), state, strict, found.path.name)
        if not found.path.exists():
            raise BadState(f"rank {team.rank} does not see {found.path}", hint="all ranks must share the folder")
    for name in missing if team.rank == 0 else ():
        logger.warning("torchLoom: %s has no %s; it stays as it is", found.path.name, name)
    for name in extra if team.rank == 0 else ():
        logger.warning("torchLoom: %s has %s, for which nothing was given", found.path.name, name)
    if found.manifest is not None and found.manifest.layout == "sharded":
        from torchloom.checkpoints.gathering import Gathering

        gathered = Gathering(found.path, found.manifest, state, strict, team)
        try:
            with together(team):
                check_unchanged(found)
            gathered.give_own(found.path.name)
        except BaseException:
            gathered.abandon()
            raise
        return gathered.give(strict)
    with together(team):
        tree = _read(found, state, strict, team)
        check_unchanged(found)
    with together(team):
        objects.give(state, tree["state"], strict, found.path.name)
    return tree


def _parts(found: Found) -> Iterable[str]:
    return found.manifest.parts if found.manifest is not None else _foreign(found).keys()


def _read(found: Found, state: Mapping[str, Any], strict: bool, team: Team) -> dict[str, Any]:
    """What one process saved, if this state can take it."""
    where = found.path.name
    if objects.is_sharded(state):
        raise BadState(
            f"{where} was saved by one process, as one file; a model sharded over ranks cannot take it",
            hint="load() it into the model before it is wrapped",
        )
    if found.manifest is None:
        tree: dict[str, Any] = {"state": _foreign(found), "torchloom": {}, "rng": {}}
    else:
        tree = single.read(found.path / single.FILE)
        if team.size != found.manifest.world_size:
            tree["rng"] = {}
    objects.check_fit(state, tree["state"], strict, where)
    return tree


def _foreign(found: Found) -> dict[str, Any]:
    if found.kind != "torch.save":
        raise BadState(
            f"{found.path.name} is a checkpoint of another kind ({found.kind})",
            hint="it is whole as far as can be told; load it with what wrote it",
        )
    state = single.read(found.path)
    if not isinstance(state, dict):
        raise BadState(f"{found.path.name} holds a {type(state).__name__}, not a dict of parts")
    return state


def check_unchanged(found: Found) -> None:
    """That what was read is what was checked."""
    if found.signature and signature(found.path) != found.signature:
        raise Damaged(found.path, "it was changed while it was read")
