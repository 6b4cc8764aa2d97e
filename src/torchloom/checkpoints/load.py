"""Loads a valid checkpoint: every rank reads everything before anything is changed."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torchloom.checkpoints import stateful_objects, torch_files
from torchloom.checkpoints.coordination import Coordinator, all_or_none
from torchloom.checkpoints.store.search import ValidCheckpoint
from torchloom.errors import BadState

logger = logging.getLogger("torchloom")


@dataclass(frozen=True, kw_only=True)
class Loaded(ValidCheckpoint):
    """A checkpoint as data."""

    state: dict[str, Any]
    """By the names of the saved state."""


def load(checkpoint: ValidCheckpoint, strict: bool) -> Loaded:
    """Load all of it in this process."""
    manifest = checkpoint.manifest
    if manifest is not None and manifest.layout == "sharded":
        from torchloom.checkpoints.sharded_load import assemble

        state = assemble(checkpoint.path, manifest, strict)
    else:
        state = _read(checkpoint)["state"]
    checkpoint.check_unchanged()
    return Loaded(**vars(checkpoint), state=state)


def resume(
    checkpoint: ValidCheckpoint, state: Mapping[str, Any], strict: bool, coordinator: Coordinator
) -> dict[str, Any]:
    """Load each object's state; returns this rank's own parts (`rng`, `torchloom`)."""
    manifest, where = checkpoint.manifest, checkpoint.path.name
    tree: dict[str, Any] = {}
    with all_or_none(coordinator):
        if not checkpoint.path.exists():
            raise BadState(
                f"rank {coordinator.rank} does not see {checkpoint.path}", hint="all ranks must share the folder"
            )
        if manifest is None:
            tree = _read(checkpoint)
        parts = tree["state"] if manifest is None else manifest.parts
        missing, extra = stateful_objects.check_parts(parts, state, strict, where)
    for name in missing if coordinator.rank == 0 else ():
        logger.warning("torchLoom: %s has no %s; it stays as it is", where, name)
    for name in extra if coordinator.rank == 0 else ():
        logger.warning("torchLoom: %s has %s, for which nothing was given", where, name)
    if manifest is not None and manifest.layout == "sharded":
        from torchloom.checkpoints import sharded_load

        return sharded_load.resume(checkpoint, manifest, state, strict, coordinator)
    with all_or_none(coordinator):
        if stateful_objects.is_sharded(state):
            raise BadState(
                f"{where} was saved by one process, as one file; a model sharded over ranks cannot take it",
                hint="load() it into the model before it is wrapped",
            )
        tree = tree or _read(checkpoint)
        stateful_objects.check_fit(state, tree["state"], strict, where)
        checkpoint.check_unchanged()
    with all_or_none(coordinator):
        stateful_objects.give(state, tree["state"], strict, where)
    return tree if coordinator.size == 1 else tree | {"rng": {}}


def _read(checkpoint: ValidCheckpoint) -> dict[str, Any]:
    """What one process saved."""
    if checkpoint.manifest is not None:
        tree: dict[str, Any] = torch_files.read(checkpoint.path / torch_files.STATE)
        return tree
    if checkpoint.kind != "torch.save":
        raise BadState(
            f"{checkpoint.path.name} is a checkpoint of another kind ({checkpoint.kind})",
            hint="no damage was found; load it with the library that wrote it",
        )
    state = torch_files.read(checkpoint.path)
    if not isinstance(state, dict):
        raise BadState(f"{checkpoint.path.name} holds a {type(state).__name__}, not a dict of parts")
    return {"state": state, "torchloom": {}, "rng": {}}
