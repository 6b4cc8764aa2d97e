"""Saves the state of many ranks: each writes its part through torch.distributed.checkpoint into one checkpoint.

In save() every rank reports what it has, learns from the first rank which part to write, and copies that part. After
that ranks do not communicate: each writes into the same hidden folder and creates a mark when its part is durable; the
first rank waits for all marks, writes the manifest and renames the folder. A rank that fails also creates a mark, or
removes its first one, which is possible even on a full disk.

    .writing-R   rank R has started
    .part-R      rank R has finished: its files and checksums
    .failed-R    rank R has failed, and why

Modules and optimizers belong to the job: what is equal on several ranks is written once. Everything else (a sampler, a
scheduler, random numbers, a plain value) belongs to its rank, and is saved for each rank. Of what belongs to the job
but may differ between ranks (running means), the first rank's value is saved, as when DDP broadcasts buffers.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pickle
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, Literal

import msgspec
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.planner import WriteItemType
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict

from torchloom.checkpoints import stateful_objects, torch_files
from torchloom.checkpoints.coordination import Coordinator
from torchloom.checkpoints.pending_save import PendingSave
from torchloom.checkpoints.staging import StagedState, StagingBuffers
from torchloom.checkpoints.store import commit
from torchloom.checkpoints.store import manifest as manifests
from torchloom.checkpoints.store.checksums import ChecksummedFile, describe, signature
from torchloom.checkpoints.store.manifest import FileEntry
from torchloom.errors import BadInput, BadState
from torchloom.shared.files import replace_file
from torchloom.shared.json_decoding import decoder

POLL_SECONDS = 0.01
PATIENCE = 60.0
"""Seconds without progress of any rank after which the others give up."""
METADATA: Final = ".metadata"


def own_file(rank: int) -> str:
    return f"rank-{rank}.pt"


def split(state: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """What belongs to the job, and what belongs to each rank."""
    shared = {name: part for name, part in state.items() if stateful_objects.is_large(part) or _is_spread(part)}
    return shared, {name: part for name, part in state.items() if name not in shared}


def _is_spread(part: Any) -> bool:
    """Whether each rank has a piece of its tensors. Other plain values may differ and are saved for each rank."""
    return not stateful_objects.is_live(part) and stateful_objects.is_sharded({"part": part})


def _check_keys(value: Any, place: str) -> None:
    """Reject keys that are not text: torch.distributed.checkpoint would convert them, and the state would not load."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            if not isinstance(key, str):
                raise BadInput(
                    f"{place}: {key!r} cannot be a key beside tensors that several ranks save",
                    hint="hand in the optimizer and its module, not a state_dict; or make the key a text",
                )
            _check_keys(item, f"{place}[{key!r}]")
    elif isinstance(value, list):
        for at, item in enumerate(value):
            _check_keys(item, f"{place}[{at}]")


def shared_state(shared: Mapping[str, Any]) -> dict[str, Any]:
    """The state of modules and optimizers by parameter names, which do not depend on the number of ranks."""
    states: dict[str, Any] = {}
    for name, part in shared.items():
        if isinstance(part, torch.nn.Module):
            states[name] = get_model_state_dict(part)
        elif isinstance(part, torch.optim.Optimizer):
            states[name] = get_optimizer_state_dict(model_of(name, part, shared), part)
        else:
            states[name] = part
    return states


def state_to_save(shared: Mapping[str, Any]) -> dict[str, Any]:
    """The same, without creating the state of an optimizer that has none yet."""
    fresh = {name: p for name, p in shared.items() if isinstance(p, torch.optim.Optimizer) and not p.state}
    try:
        states = shared_state(shared)
    finally:
        for optimizer in fresh.values():
            optimizer.state.clear()
    for name in fresh:
        states[name]["state"] = {}
    return states


def buffers_of(shared: Mapping[str, Any], state: Mapping[str, Any]) -> set[str]:
    """The names of the buffers of modules, identified by their memory, whatever wraps the module."""
    names = set()
    for name, part in shared.items():
        if isinstance(part, torch.nn.Module):
            places = {buffer.untyped_storage().data_ptr() for buffer in part.buffers() if type(buffer) is torch.Tensor}
            for key, value in state[name].items():
                if type(value) is torch.Tensor and value.untyped_storage().data_ptr() in places:
                    names.add(f"{name}.{key}")
    return names


def model_of(name: str, optimizer: torch.optim.Optimizer, shared: Mapping[str, Any]) -> torch.nn.Module:
    """The module whose parameters this optimizer updates."""
    ids = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    for part in shared.values():
        if isinstance(part, torch.nn.Module) and ids <= {id(parameter) for parameter in part.parameters()}:
            return part
    raise BadInput(
        f"no module in the state has all parameters of {name}",
        hint="several ranks save an optimizer by its parameters' names: hand in the module, not its state_dict",
    )


class _Planner(DefaultSavePlanner):  # type: ignore[misc]
    """Plans with the live state; copies of this rank's share are written later."""

    def set_up(self, shared: Mapping[str, Any], is_first: bool) -> None:
        for name, part in shared.items():
            if not stateful_objects.is_large(part):
                _check_keys(part, f"state[{name!r}]")
        state = state_to_save(shared)
        self._buffers = buffers_of(shared, state)
        self.set_up_planner(state, is_coordinator=is_first)
        StagingBuffers().copy(
            {key: value for key, value in self.state_dict.items() if not isinstance(value, torch.Tensor)}
        )

    def create_global_plan(self, all_plans: list[Any]) -> Any:
        """Assign tensors that several ranks have to one of them each; the first rank writes the rest."""
        first, *others = all_plans
        firsts = {
            item.index for item in first.items if item.type == WriteItemType.BYTE_IO or item.index.fqn in self._buffers
        }
        rest = [
            dataclasses.replace(plan, items=[item for item in plan.items if item.index not in firsts])
            for plan in others
        ]
        return super().create_global_plan([first, *rest])

    def copy_out(self, plan: Any, copier: StagingBuffers) -> int:
        """Copy what this rank writes; returns its size."""
        originals = [super(_Planner, self).resolve_data(item) for item in plan.items]
        tensors = {at: value.detach() for at, value in enumerate(originals) if isinstance(value, torch.Tensor)}
        copied = copier.copy(tensors)
        self._copies = {
            item.index: copied.tree.get(at, value)
            for at, (item, value) in enumerate(zip(plan.items, originals, strict=True))
        }
        return copied.size

    def resolve_data(self, write_item: Any) -> Any:
        return self._copies[write_item.index]


class _Files(FileSystem):  # type: ignore[misc]
    """Makes torch.distributed.checkpoint write into files that compute their checksums."""

    def __init__(self, grown: Callable[[int], None]) -> None:
        self._grown = grown
        self.sinks: list[ChecksummedFile] = []

    @contextlib.contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[Any]:  # noqa: ARG002  always to write
        with ChecksummedFile(Path(path), self._grown) as sink:
            self.sinks.append(sink)
            yield sink


class ShardedSave:
    """One rank's side of a save."""

    layout: Literal["single", "sharded"] = "sharded"

    def __init__(
        self,
        saving: PendingSave,
        state: Mapping[str, Any],
        rank_state: dict[str, Any],
        copier: StagingBuffers,
        coordinator: Coordinator,
    ) -> None:
        self._saving = saving
        self._coordinator = coordinator
        self._copier = copier
        self.id = coordinator.next_id()
        self._draft = commit.hidden(saving.path.parent, "saving", saving.step, self.id)
        self._planner = _Planner()
        self._metadata: Any = None
        try:
            self._plan = self._share(state, rank_state)
            self.size += self._planner.copy_out(self._plan, copier)
        except BaseException as error:
            self._give_up(error)
            self.release()
            raise

    def _share(self, state: Mapping[str, Any], rank_state: dict[str, Any]) -> Any:
        """This rank's part, which the first rank assigns once all have reported what they have."""

        def report() -> tuple[set[str], Any]:
            shared, own = split(state)
            copied = StagingBuffers().copy({"own": stateful_objects.gather(own), **rank_state})
            self._own, self.size = copied, copied.size
            self._planner.set_up(shared, is_first=self._coordinator.rank == 0)
            plan = self._planner.create_local_plan()
            self._draft.mkdir(exist_ok=True, parents=True)
            (self._draft / f".writing-{self._coordinator.rank}").touch()
            return set(state), plan

        def share(reports: list[Any]) -> list[Any]:
            for rank, (names, _) in enumerate(reports):
                if other := names ^ reports[0][0]:
                    raise BadInput(
                        f"rank {rank} and rank 0 differ in what they save: {', '.join(sorted(other))}",
                        hint="each rank hands in the same names",
                    )
            plans, self._metadata = self._planner.create_global_plan([plan for _, plan in reports])
            return list(dcp.FileSystemWriter(self._draft).prepare_global_plan(plans))

        return self._planner.finish_plan(self._coordinator.scatter(report, share))

    # ── on the writing thread ────────────────────────────────────────────────────────────────────────────────────────

    def write(self) -> None:
        rank = self._coordinator.rank
        try:
            self._write_part(self._saving.grow)
            if rank == 0:
                self._complete()
        except BaseException as error:
            self._give_up(error)
            raise
        if rank != 0:
            self._await_outcome()

    def _write_part(self, grown: Callable[[int], None]) -> None:
        rank = self._coordinator.rank
        files = _Files(grown)
        writer = dcp.FileSystemWriter(self._draft, single_file_per_rank=True, sync_files=True, thread_count=1)
        writer.fs = files
        results = writer.write_data(self._plan, self._planner).wait() if self._plan.items else []
        entries = [sink.entry for sink in files.sinks]
        entries.append(torch_files.write(self._draft / own_file(rank), self._own.tree, grown))
        replace_file(self._draft / f".part-{rank}", pickle.dumps((msgspec.json.encode(entries), results)))

    def _give_up(self, error: BaseException) -> None:
        """Report a failure to the first rank; on the first rank, give up the checkpoint."""
        rank = self._coordinator.rank
        if rank == 0:
            doomed = commit.hidden(self._draft.parent, "deleting", self._saving.step, commit.new_id())
            try:
                self._draft.rename(doomed)  # before it is emptied, so that ranks that still write fail
            except OSError:
                doomed = self._draft
            commit.remove(doomed)
            return
        with contextlib.suppress(OSError):
            (self._draft / f".failed-{rank}").write_text(str(error)[:1000])
        with contextlib.suppress(OSError):
            (self._draft / f".writing-{rank}").unlink()

    def _complete(self) -> None:
        """All parts are complete: write one description of them, and rename."""
        parts = [torch_files.load_metadata(data) for data in self._await_parts()]
        entries = [entry for files, _ in parts for entry in decoder(list[FileEntry])(files)]
        dcp.FileSystemWriter(self._draft, sync_files=True).finish(self._metadata, [results for _, results in parts])
        entries.append(describe(self._draft / METADATA))
        for mark in self._draft.iterdir():
            if mark.name.startswith((".part-", ".writing-", ".failed-")):
                mark.unlink()
        commit.commit(self._draft, self._saving.make_manifest(tuple(entries), self.id))

    def _await_parts(self) -> list[bytes]:
        """Wait for the report of each rank on its part; raises if a rank has failed."""
        began: set[int] = set()
        growth = Growth(self._draft)
        while True:
            names = growth.look()
            waiting = [rank for rank in range(self._coordinator.size) if f".part-{rank}" not in names]
            if not waiting:
                return [(self._draft / f".part-{rank}").read_bytes() for rank in range(self._coordinator.size)]
            began |= {rank for rank in waiting if f".writing-{rank}" in names}
            for rank in waiting:
                if f".failed-{rank}" in names:
                    why = (self._draft / f".failed-{rank}").read_text()
                    raise BadState(f"rank {rank}: {why or 'it could not write its part'}")
                if rank in began and f".writing-{rank}" not in names:
                    raise BadState(f"rank {rank} could not write its part, nor say why; is the disk full?")
            if growth.ended:
                late = ", ".join(map(str, waiting))
                raise BadState(f"rank {late} wrote nothing for {PATIENCE:g} s; do all ranks see {self._draft.parent}?")
            time.sleep(POLL_SECONDS)

    def _await_outcome(self) -> None:
        """Wait until the first rank has renamed or removed the folder."""
        growth = Growth(self._draft)
        while growth.look():
            if growth.ended:
                raise BadState("the first rank did not complete it")
            time.sleep(POLL_SECONDS)
        final = self._saving.path
        if not final.exists() or manifests.read(final).id != self.id:
            raise BadState("another rank could not write its part, or the first could not complete it")

    def release(self) -> None:
        self._own = StagedState()
        self._planner = _Planner()
        self._copier.release()


class Growth:
    """Whether a folder still grows: a rank waits for the others as long as it does."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._size = -1
        self._since = time.monotonic()

    def look(self) -> set[str]:
        """The names in it; empty if it is gone."""
        files = signature(self._folder)
        size = sum(file[2] for file in files)
        if size != self._size:
            self._size, self._since = size, time.monotonic()
        return {file[0] for file in files}

    @property
    def ended(self) -> bool:
        return time.monotonic() - self._since > PATIENCE
