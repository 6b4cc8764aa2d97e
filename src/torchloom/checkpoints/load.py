"""Loads a valid checkpoint: every rank reads everything before anything is changed."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torchloom.checkpoints import single_file, stateful_objects
from torchloom.checkpoints.coordination import Coordinator, all_or_none
from torchloom.checkpoints.store.manifest import Manifest
from torchloom.checkpoints.store.search import ValidCheckpoint
from torchloom.checkpoints.store.verification import signature
from torchloom.errors import BadState, Damaged

logger = logging.getLogger("torchloom")


@dataclass(frozen=True)
class Loaded:
    """A checkpoint as data."""

    step: int
    path: Path
    state: dict[str, Any]
    """By the names of the saved state."""
    manifest: Manifest | None = None
    """None for a checkpoint that torchLoom did not write."""
    rejected: Mapping[str, str] = field(default_factory=dict)
    """Newer checkpoints that are not valid, and why."""


def load(checkpoint: ValidCheckpoint, strict: bool) -> Loaded:
    """Load all of it in this process."""
    manifest = checkpoint.manifest
    if manifest is None:
        state = _foreign(checkpoint)
    elif manifest.layout == "single":
        state = single_file.read(checkpoint.path / single_file.FILE)["state"]
    else:
        from torchloom.checkpoints.sharded_load import assemble

        state = assemble(checkpoint.path, manifest, strict)
    check_unchanged(checkpoint)
    return Loaded(checkpoint.step, checkpoint.path, state, manifest, checkpoint.rejected)


def resume(
    checkpoint: ValidCheckpoint, state: Mapping[str, Any], strict: bool, coordinator: Coordinator
) -> dict[str, Any]:
    """Load each object's state; returns this rank's own parts (`rng`, `torchloom`)."""
    with all_or_none(coordinator):
        missing, extra = stateful_objects.check_parts(_parts(checkpoint), state, strict, checkpoint.path.name)
        if not checkpoint.path.exists():
            raise BadState(
                f"rank {coordinator.rank} does not see {checkpoint.path}", hint="all ranks must share the folder"
            )
    for name in missing if coordinator.rank == 0 else ():
        logger.warning("torchLoom: %s has no %s; it stays as it is", checkpoint.path.name, name)
    for name in extra if coordinator.rank == 0 else ():
        logger.warning("torchLoom: %s has %s, for which nothing was given", checkpoint.path.name, name)
    if checkpoint.manifest is not None and checkpoint.manifest.layout == "sharded":
        from torchloom.checkpoints.sharded_load import ShardedLoad

        gathered = ShardedLoad(checkpoint.path, checkpoint.manifest, state, strict, coordinator)
        try:
            with all_or_none(coordinator):
                check_unchanged(checkpoint)
            gathered.give_own(checkpoint.path.name)
        except BaseException:
            gathered.abandon()
            raise
        return gathered.give(strict)
    with all_or_none(coordinator):
        tree = _read(checkpoint, state, strict, coordinator)
        check_unchanged(checkpoint)
    with all_or_none(coordinator):
        stateful_objects.give(state, tree["state"], strict, checkpoint.path.name)
    return tree


def _parts(checkpoint: ValidCheckpoint) -> Iterable[str]:
    return checkpoint.manifest.parts if checkpoint.manifest is not None else _foreign(checkpoint).keys()


def _read(
    checkpoint: ValidCheckpoint, state: Mapping[str, Any], strict: bool, coordinator: Coordinator
) -> dict[str, Any]:
    """Read what one process saved, and check that it fits this state."""
    where = checkpoint.path.name
    if stateful_objects.is_sharded(state):
        raise BadState(
            f"{where} was saved by one process, as one file; a model sharded over ranks cannot take it",
            hint="load() it into the model before it is wrapped",
        )
    if checkpoint.manifest is None:
        tree: dict[str, Any] = {"state": _foreign(checkpoint), "torchloom": {}, "rng": {}}
    else:
        tree = single_file.read(checkpoint.path / single_file.FILE)
        if coordinator.size != checkpoint.manifest.world_size:
            tree["rng"] = {}
    stateful_objects.check_fit(state, tree["state"], strict, where)
    return tree


def _foreign(checkpoint: ValidCheckpoint) -> dict[str, Any]:
    if checkpoint.kind != "torch.save":
        raise BadState(
            f"{checkpoint.path.name} is a checkpoint of another kind ({checkpoint.kind})",
            hint="no damage was found; load it with the library that wrote it",
        )
    state = single_file.read(checkpoint.path)
    if not isinstance(state, dict):
        raise BadState(f"{checkpoint.path.name} holds a {type(state).__name__}, not a dict of parts")
    return state


def check_unchanged(checkpoint: ValidCheckpoint) -> None:
    """Check that the files have not changed since they were verified."""
    if checkpoint.signature and signature(checkpoint.path) != checkpoint.signature:
        raise Damaged(checkpoint.path, "it was changed while it was read")
