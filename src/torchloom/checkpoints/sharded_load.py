"""Loads what many ranks saved, with the same number of ranks, another number, or in one process.

Each rank reads its share into host memory. Once all have done so, the state is filled from there: it is never half
loaded, and no device needs room for a second model.
"""

from __future__ import annotations

import io
import logging
import warnings
from collections.abc import Mapping, MutableMapping
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, create_default_local_load_plan
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict, set_optimizer_state_dict

from torchloom.checkpoints import stateful_objects, torch_files
from torchloom.checkpoints.coordination import Coordinator, all_or_none
from torchloom.checkpoints.sharded_save import METADATA, model_of, own_file, shared_state
from torchloom.checkpoints.store.manifest import Manifest
from torchloom.checkpoints.store.search import ValidCheckpoint
from torchloom.errors import BadState, Damaged

logger = logging.getLogger("torchloom")


class Reader(dcp.FileSystemReader):  # type: ignore[misc]
    """Unpickles safely, and reads no file outside of the folder."""

    def __init__(self, folder: Path, names: set[str]) -> None:
        super().__init__(folder)
        self._folder = folder
        self._names = names

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        folder = self._folder
        try:
            metadata = torch_files.load_metadata((folder / METADATA).read_bytes())
            if not isinstance(metadata, Metadata):
                raise Damaged(folder, f"its {METADATA} is none")
            for info in metadata.storage_data.values():
                if info.relative_path not in self._names:
                    raise Damaged(folder, f"its {METADATA} names {info.relative_path!r}, which is no part of it")
        except Damaged:
            raise
        except Exception as error:  # whatever a damaged or hostile pickle leads to
            raise Damaged(folder, f"its {METADATA} cannot be read: {torch_files.first_line(error)}") from error
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


def resume(
    checkpoint: ValidCheckpoint, manifest: Manifest, state: Mapping[str, Any], strict: bool, coordinator: Coordinator
) -> dict[str, Any]:
    """Load each object's state; returns this rank's own parts (`rng`, `torchloom`)."""
    path = checkpoint.path
    present = {name: part for name, part in state.items() if name in manifest.parts}
    # A rank that fails must report it before the others wait for it below.
    with all_or_none(coordinator):
        names = _own_names(path, present)
        rank_state = _rank_state(path, manifest, {name: present[name] for name in names}, strict, coordinator)
    own = rank_state.pop("own")
    shared = {name: part for name, part in present.items() if name not in names}
    fresh = [part for part in shared.values() if isinstance(part, torch.optim.Optimizer) and not part.state]
    planner = _Planner(strict)
    reader = Reader(path, manifest.file_names)
    try:
        with all_or_none(coordinator):
            metadata = reader.read_metadata()
            live = shared_state(shared)  # this creates the state of an optimizer that has none yet
            _leave_out_what_had_no_state(shared, live, metadata)
        if strict:
            _check_keys(path, metadata, live, coordinator)
        if live:
            _read(path, reader, live, planner, coordinator)
        with ExitStack() as undo:
            with all_or_none(coordinator):
                checkpoint.check_unchanged()
                # This rank's own parts come first, because they may fail; the other ranks then undo theirs.
                plain = _give_live(state, own, path.name, undo)
            undo.pop_all()
    except BaseException:
        for optimizer in fresh:
            optimizer.state.clear()
        raise
    planner.fill()
    if isinstance(state, MutableMapping):
        state.update({name: stateful_objects.fill_in(state[name], value) for name, value in plain.items()})
    for name, part in shared.items():
        if isinstance(part, torch.nn.Module):
            set_model_state_dict(part, live[name], options=StateDictOptions(strict=strict))
        elif isinstance(part, torch.optim.Optimizer):
            options = StateDictOptions(strict=False)  # a parameter may have no state; the rest was checked
            set_optimizer_state_dict(model_of(name, part, shared), part, live[name], options=options)
        elif isinstance(state, MutableMapping):
            state[name] = live[name]
    return rank_state


def _give_live(state: Mapping[str, Any], own: Mapping[str, Any], where: str, undo: ExitStack) -> dict[str, Any]:
    """Load this rank's own objects; returns its plain values."""
    live = {name: state[name] for name in own if stateful_objects.is_live(state[name])}
    plain = {name: value for name, value in own.items() if name not in live}
    if plain and not isinstance(state, MutableMapping):
        raise stateful_objects.unwritable(min(plain))
    undo.enter_context(stateful_objects.give(live, own, False, where))
    return plain


def _read(path: Path, reader: Reader, live: dict[str, Any], planner: _Planner, coordinator: Coordinator) -> None:
    group = coordinator.group
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns that there is only one process
            dcp.load(live, storage_reader=reader, planner=planner, process_group=group, no_dist=group is None)
    except dcp.CheckpointException as error:
        rank, failure = min(error.failures.items())
        raise BadState(
            f"{path.name} does not fit: rank {rank}: {torch_files.first_line(failure[0])}", hint="nothing was loaded"
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
    there = torch_files.read(path / own_file(0))["own"]
    for name, part in present.items():
        belongs_to_job = stateful_objects.is_large(part) or (name not in there and not stateful_objects.is_live(part))
        if belongs_to_job == (name in there):
            raise BadState(f"{path.name}: {name} was saved as something else than it is now", hint="nothing was loaded")
    return [name for name in present if name in there]


def _rank_state(
    path: Path, manifest: Manifest, parts: Mapping[str, Any], strict: bool, coordinator: Coordinator
) -> dict[str, Any]:
    """What this rank saved for itself. If the number of ranks has changed: the parts that were the same on all."""
    if coordinator.size == manifest.world_size:
        rank_state: dict[str, Any] = torch_files.read(path / own_file(coordinator.rank))
        return rank_state | {"own": {name: rank_state["own"][name] for name in parts}}
    common, different, ranks = _read_common(path, manifest)
    for name in (name for name in parts if name in different):
        try:
            common[name] = _merge(name, parts[name], ranks, coordinator)
        except BadState as error:
            if strict:
                hint = "strict=False leaves it as it is; nothing was loaded"
                raise BadState(f"{path.name}: {error.message}", hint=hint) from None
            logger.warning("torchLoom: %s in %s; it stays as it is", error.message, path.name)
    own = {name: common[name] for name in parts if name in common}
    return {"own": own, "rng": {}, "torchloom": ranks[0]["torchloom"]}


def _merge(name: str, part: Any, ranks: list[dict[str, Any]], coordinator: Coordinator) -> Any:
    """One state for all ranks now, of a part that can make it from what each rank saved."""
    merge = getattr(part, "merge_rank_states", None)
    if merge is None:
        raise BadState(f"{name} differed between {len(ranks)} ranks, and there are {coordinator.size} now")
    return merge([rank["own"][name] for rank in ranks])


def _read_common(path: Path, manifest: Manifest) -> tuple[dict[str, Any], list[str], list[dict[str, Any]]]:
    """The parts that were the same on all ranks, the names of the others, and what each rank saved."""
    ranks = [torch_files.read(path / own_file(rank)) for rank in range(manifest.world_size)]
    first, *others = ranks
    common = {
        name: part for name, part in first["own"].items() if all(same(part, other["own"][name]) for other in others)
    }
    return common, [name for name in first["own"] if name not in common], ranks


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
    reader = Reader(path, manifest.file_names)
    metadata = reader.read_metadata()
    state: dict[str, Any] = {}
    for key, where in (metadata.planner_data or {}).items():
        described = metadata.state_dict_metadata[key]
        is_tensor = isinstance(described, TensorStorageMetadata)
        place(state, where, torch.empty(described.size, dtype=described.properties.dtype) if is_tensor else None)
    planner = _Planner(strict=True)
    _read(path, reader, state, planner, Coordinator())
    planner.fill()
    common, different, _ = _read_common(path, manifest)
    if strict and different:
        raise BadState(
            f"{path.name}: {different[0]} differed between its {manifest.world_size} ranks",
            hint="strict=False leaves it out; resume() gives each rank its own",
        )
    return state | common
