"""Loads what many ranks saved, with the same number of ranks, another number, or in one process.

Each rank reads its share into host memory. Once all have done so, the state is filled from there: it is never half
loaded, and no device needs room for a second model.
"""

from __future__ import annotations

import copy
import io
import logging
import warnings
from collections.abc import Iterable, Mapping, MutableMapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, create_default_local_load_plan
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict, set_optimizer_state_dict

from torchloom.checkpoints import safe_pickle, single_file, stateful_objects
from torchloom.checkpoints.coordination import Coordinator, all_or_none
from torchloom.checkpoints.sharded_save import METADATA, model_of, own_file, shared_state
from torchloom.checkpoints.store.manifest import Manifest
from torchloom.errors import BadState, Damaged

logger = logging.getLogger("torchloom")


class _Reader(dcp.FileSystemReader):  # type: ignore[misc]
    """Unpickles safely, and reads no file outside of the folder."""

    def __init__(self, path: Path, manifest: Manifest) -> None:
        super().__init__(path)
        self._names = {file.name for file in manifest.files}
        self._folder = path

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        return read_metadata(self._folder, self._names)


def read_metadata(folder: Path, names: set[str]) -> Metadata:
    try:
        metadata = safe_pickle.load_metadata((folder / METADATA).read_bytes())
        if not isinstance(metadata, Metadata):
            raise Damaged(folder, f"its {METADATA} is none")
        for info in metadata.storage_data.values():
            if info.relative_path not in names:
                raise Damaged(folder, f"its {METADATA} names {info.relative_path!r}, which is no part of it")
    except Damaged:
        raise
    except Exception as error:  # whatever a damaged or hostile pickle leads to
        raise Damaged(folder, f"its {METADATA} cannot be read: {single_file.first_line(error)}") from error
    return metadata


class _Planner(DefaultLoadPlanner):  # type: ignore[misc]
    """Plans with the live state, reads into buffers, and fills the state from them in fill()."""

    def __init__(self, strict: bool) -> None:
        super().__init__(allow_partial_load=not strict)
        self._buffers: dict[Any, torch.Tensor] = {}
        self._others: dict[str, Any] = {}

    def create_local_plan(self) -> Any:
        # Torch's planner takes a rank without a piece of some tensor for a sign of an old format.
        return create_default_local_load_plan(self.state_dict, self.metadata, not self.allow_partial_load)

    def load_bytes(self, read_item: Any, value: io.BytesIO) -> None:
        self._others[read_item.dest_index.fqn] = torch.load(value, weights_only=True)

    def resolve_tensor(self, read_item: Any) -> torch.Tensor:
        index = read_item.dest_index
        if index not in self._buffers:
            there = self.lookup_tensor(index)
            self._buffers[index] = torch.empty(there.shape, dtype=there.dtype)
        buffer: torch.Tensor = self.transform_tensor(read_item, self._buffers[index])
        return buffer

    def fill(self) -> None:
        with torch.no_grad():
            for index, buffer in self._buffers.items():
                self.lookup_tensor(index).detach().copy_(buffer)
        for key, value in self._others.items():
            place(self.original_state_dict, self.mappings[key], value)


def place(tree: Any, path: tuple[Any, ...], value: Any) -> None:
    """Put a value into nested dicts and lists, creating those that are missing."""
    for key, following in pairwise(path):
        empty: Any = [] if isinstance(following, int) else {}
        if isinstance(tree, list):
            tree.extend([None] * (key + 1 - len(tree)))
            if tree[key] is None:
                tree[key] = empty
        elif key not in tree:
            tree[key] = empty
        tree = tree[key]
    if isinstance(tree, list):
        tree.extend([None] * (path[-1] + 1 - len(tree)))
    tree[path[-1]] = value


class ShardedLoad:
    """What was read, and the objects it is for."""

    def __init__(
        self, path: Path, manifest: Manifest, state: Mapping[str, Any], strict: bool, coordinator: Coordinator
    ) -> None:
        self._state = state
        self._coordinator = coordinator
        present = {name: part for name, part in state.items() if name in manifest.parts}
        # A rank that fails must report it before the others wait for it below.
        with all_or_none(coordinator):
            names = _own_names(path, present)
            self._own = _own_states(path, manifest, names, strict, coordinator)
        self._shared = {name: part for name, part in present.items() if name not in names}
        self._planner = _Planner(strict)
        self._fresh = [p for p in self._shared.values() if isinstance(p, torch.optim.Optimizer) and not p.state]
        reader = _Reader(path, manifest)
        try:
            with all_or_none(coordinator):
                metadata = reader.read_metadata()
                self._live = shared_state(self._shared)  # this creates the state of an optimizer that has none yet
                _leave_out_what_had_no_state(self._shared, self._live, metadata)
            if strict:
                _check_keys(path, metadata, self._live, coordinator)
            if self._live:
                _read(path, reader, self._live, self._planner, coordinator)
        except BaseException:
            self.abandon()
            raise

    def abandon(self) -> None:
        """Drop what was read."""
        for optimizer in self._fresh:
            optimizer.state.clear()

    def give_own(self, where: str) -> None:
        """Load this rank's own parts first, because they may fail. If one rank fails, the others undo it."""
        own = self._own["own"]
        live_parts = {name: self._state[name] for name in own if stateful_objects.is_live(self._state[name])}
        before = copy.deepcopy(stateful_objects.gather(live_parts))
        succeeded = False
        try:
            with all_or_none(self._coordinator):
                if len(live_parts) < len(own) and not isinstance(self._state, MutableMapping):
                    name = min(own.keys() - live_parts.keys())
                    raise BadState(f"{name} is a plain value and the state cannot be written to", hint="pass a dict")
                stateful_objects.give(live_parts, own, False, where)
                succeeded = True
        except BaseException:
            if succeeded:
                stateful_objects.give(live_parts, before, False, where)
            raise

    def give(self, strict: bool) -> dict[str, Any]:
        """Fill the state; returns this rank's own parts."""
        self._planner.fill()
        if isinstance(self._state, MutableMapping):
            own = self._own["own"]
            plain = {name: value for name, value in own.items() if not stateful_objects.is_live(self._state[name])}
            for name, value in plain.items():
                self._state[name] = stateful_objects.fill_in(self._state[name], value)
        for name, part in self._shared.items():
            if isinstance(part, torch.nn.Module):
                set_model_state_dict(part, self._live[name], options=StateDictOptions(strict=strict))
            elif isinstance(part, torch.optim.Optimizer):
                options = StateDictOptions(strict=False)  # a parameter may have no state; the rest was checked
                set_optimizer_state_dict(model_of(name, part, self._shared), part, self._live[name], options=options)
            elif isinstance(self._state, MutableMapping):
                self._state[name] = self._live[name]
        return {"rng": self._own["rng"], "torchloom": self._own["torchloom"]}


def _read(path: Path, reader: _Reader, live: dict[str, Any], planner: _Planner, coordinator: Coordinator) -> None:
    group = coordinator.group
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns that there is only one process
            dcp.load(live, storage_reader=reader, planner=planner, process_group=group, no_dist=group is None)
    except dcp.CheckpointException as error:
        rank, failure = min(error.failures.items())
        raise BadState(
            f"{path.name} does not fit: rank {rank}: {single_file.first_line(failure[0])}", hint="nothing was loaded"
        ) from error


def _leave_out_what_had_no_state(shared: Mapping[str, Any], live: dict[str, Any], metadata: Metadata) -> None:
    """Leave out parameters that had no gradient yet, and therefore no optimizer state."""
    saved = {where[:3] for where in (metadata.planner_data or {}).values()}
    for name, part in shared.items():
        if isinstance(part, torch.optim.Optimizer):
            states = live[name]["state"]
            live[name]["state"] = {key: state for key, state in states.items() if (name, "state", key) in saved}


def _check_keys(path: Path, metadata: Metadata, live: dict[str, Any], coordinator: Coordinator) -> None:
    """Check that it contains exactly what all ranks together need. One rank may have no piece of a small tensor."""
    with all_or_none(coordinator):
        planner = DefaultLoadPlanner()
        planner.set_up_planner(live, metadata)
    here = {key for keys in coordinator.gather(sorted(planner.state_dict)) for key in keys}
    saved = {key for key, where in (metadata.planner_data or {}).items() if where[0] in live}
    missing, extra = sorted(here - saved), sorted(saved - here)
    if missing or extra:
        difference = f"{missing[0]} is missing there" if missing else f"{extra[0]} is not in this state"
        more = len(missing) + len(extra) - 1
        raise BadState(
            f"{path.name} is of another state: {difference}" + (f", and {more} more" if more else ""),
            hint="strict=False takes what fits; nothing was loaded",
        )


def _own_names(path: Path, present: Mapping[str, Any]) -> list[str]:
    """The parts saved for each rank; the others belong to the job."""
    there = single_file.read(path / own_file(0))["own"]
    for name, part in present.items():
        belongs_to_job = stateful_objects.is_large(part) or (name not in there and not stateful_objects.is_live(part))
        if belongs_to_job == (name in there):
            raise BadState(f"{path.name}: {name} was saved as something else than it is now", hint="nothing was loaded")
    return [name for name in present if name in there]


def _own_states(
    path: Path, manifest: Manifest, names: list[str], strict: bool, coordinator: Coordinator
) -> dict[str, Any]:
    """This rank's own parts. If the number of ranks has changed: the parts that were the same on all of them."""
    if coordinator.size == manifest.world_size:
        mine = single_file.read(path / own_file(coordinator.rank))
        return {"own": {name: mine["own"][name] for name in names}, "rng": mine["rng"], "torchloom": mine["torchloom"]}
    all_ranks = [single_file.read(path / own_file(rank)) for rank in range(manifest.world_size)]
    common = _common_parts(all_ranks, names)
    for name in names:
        if name not in common and strict:
            before, now = manifest.world_size, coordinator.size
            raise BadState(
                f"{path.name}: {name} differed between {before} ranks, and there are {now} now",
                hint="strict=False leaves it as it is; nothing was loaded",
            )
        if name not in common:
            logger.warning("torchLoom: %s differed between ranks in %s; it stays as it is", name, path.name)
    return {"own": common, "rng": {}, "torchloom": all_ranks[0]["torchloom"]}


def _common_parts(all_ranks: list[Any], names: Iterable[str]) -> dict[str, Any]:
    """The parts that were the same on all ranks."""
    first, *others = [rank["own"] for rank in all_ranks]
    return {name: first[name] for name in names if all(same(first[name], other[name]) for other in others)}


def same(one: Any, other: Any) -> bool:
    """Whether two nested values are equal to the bit."""
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and one.dtype == other.dtype and torch.equal(one, other)
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def assemble(path: Path, manifest: Manifest, strict: bool) -> dict[str, Any]:
    """Load all of it in one process, without the objects it was saved from."""
    metadata = read_metadata(path, {file.name for file in manifest.files})
    state: dict[str, Any] = {}
    for key, where in (metadata.planner_data or {}).items():
        described = metadata.state_dict_metadata[key]
        is_tensor = isinstance(described, TensorStorageMetadata)
        place(state, where, torch.empty(described.size, dtype=described.properties.dtype) if is_tensor else None)
    planner = _Planner(strict=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(state, storage_reader=_Reader(path, manifest), planner=planner, no_dist=True)
    planner.fill()
    all_ranks = [single_file.read(path / own_file(rank)) for rank in range(manifest.world_size)]
    names = all_ranks[0]["own"]
    common = _common_parts(all_ranks, names)
    if strict and (different := [name for name in names if name not in common]):
        raise BadState(
            f"{path.name}: {different[0]} differed between its {manifest.world_size} ranks",
            hint="strict=False leaves it out; resume() gives each rank its own",
        )
    return state | common
