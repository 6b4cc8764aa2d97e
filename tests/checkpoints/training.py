"""A small training job with everything that has a state: what one rank of it does."""

from __future__ import annotations

import hashlib
import os
import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist

import torchloom
from torchloom.checkpoints import sharded_save
from torchloom.checkpoints.pending_save import PendingSave, PreparedSave
from torchloom.errors import BadState

Kind = Literal["plain", "ddp", "fsdp1", "fsdp2", "tensor-parallel"]


@dataclass(frozen=True)
class Plan:
    """What to train, and where to keep it."""

    folder: Path
    kind: Kind = "ddp"
    width: int = 17
    """Odd: no number of ranks divides it."""
    norm: bool = False
    """With running means, which each rank has for itself until they are broadcast."""
    spare: bool = False
    """With a layer that is never used, so that its parameters never have a gradient."""
    sampler: bool = True
    keep: int | None = None
    busy: Literal["wait", "skip"] = "wait"
    patience: float = sharded_save.PATIENCE
    """Seconds one rank waits for another that writes nothing."""
    gates: Mapping[int, Path] = field(default_factory=dict)
    """Pipes at which the writers of these ranks stop, with the first piece written, until they are opened."""


class Sampler:
    """Each rank draws its own samples."""

    def __init__(self, rank: int) -> None:
        self.position = rank * 1000
        self.refuses = False

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self.refuses and state["position"] != self.position:
            raise ValueError("this sampler is of another data set")
        self.position = state["position"]


class Counter:
    """A part that another number of ranks can continue: its states add up."""

    def __init__(self, count: int = 0, most: int = 100) -> None:
        self.count = count
        self.most = most

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]

    def merge_rank_states(self, states: list[dict[str, Any]]) -> dict[str, Any]:
        count = sum(state["count"] for state in states)
        if count > self.most:
            raise BadState(f"{count} is too much")
        return {"count": count}


class Unused(torch.nn.Linear):
    def __init__(self) -> None:
        super().__init__(3, 3)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return input


class Training:
    def __init__(self, plan: Plan, rank: int) -> None:
        self.plan = plan
        self.rank = rank
        sharded_save.PATIENCE = plan.patience
        gate = plan.gates.get(rank)
        kind = torchloom.Checkpoints if gate is None else Held
        self.checkpoints = kind(plan.folder, keep=plan.keep, busy=plan.busy)
        if isinstance(self.checkpoints, Held):
            self.checkpoints.gate = gate
        self.begin()

    def begin(self) -> None:
        """From the first step on, as in a process of its own."""
        plan = self.plan
        torch.manual_seed(0)
        layers: list[torch.nn.Module] = [torch.nn.Linear(8, plan.width), torch.nn.Dropout(), torch.nn.ReLU()]
        layers += [torch.nn.BatchNorm1d(plan.width)] * plan.norm
        layers += [torch.nn.Linear(plan.width, 1)]
        layers += [Unused()] * plan.spare
        self.model: torch.nn.Module = wrap(torch.nn.Sequential(*layers), plan.kind)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 50)
        self.sampler = Sampler(self.rank)
        self.state: dict[str, Any] = {"model": self.model, "optimizer": self.optimizer, "schedule": self.schedule}
        if plan.sampler:
            self.state["sampler"] = self.sampler
        self.step = 0
        alike = plan.kind == "tensor-parallel"  # its ranks see the same samples
        self._scale = 0.0 if alike else 1e-3
        torch.manual_seed(100 if alike else 100 + self.rank)
        random.seed(7 if alike else 7 + self.rank)

    # ── orders ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def train(self, steps: int) -> None:
        for _ in range(steps):
            batch = torch.randn(4, 8) + self.sampler.position * self._scale
            self.sampler.position += 1
            loss = (self.model(batch) - random.random()).pow(2).mean()
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            self.schedule.step()
            self.step += 1

    def save(self, step: int | None = None) -> str:
        """Save, and wait for it; why it failed, if it did."""
        saving = self.checkpoints.save(self.step if step is None else step, self.state)
        assert saving is not None
        saving.wait()
        return saving.error

    def begin_save(self) -> bool:
        """Whether one was begun."""
        return self.checkpoints.save(self.step, self.state) is not None

    def finish_save(self) -> str:
        assert self.checkpoints.saving is not None
        self.checkpoints.wait()
        return self.checkpoints.saving.error

    def resume(self, strict: bool = True) -> int:
        self.step = self.checkpoints.resume(self.state, strict=strict)
        return self.step

    def add(self, name: str, value: Any, rank: int | None = None) -> None:
        """One more part of the state, perhaps of this rank alone."""
        if rank in {None, self.rank}:
            self.state[name] = value

    def refuse(self, rank: int) -> None:
        """Let this rank's sampler accept nothing."""
        self.sampler.refuses = self.rank == rank

    def widen(self, rank: int) -> None:
        """Let this rank have another model than the others."""
        if rank == self.rank:
            inner = self.model.module if self.plan.kind == "ddp" else self.model
            inner[-1] = torch.nn.Linear(self.plan.width, 2)
            self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
            self.state["optimizer"] = self.optimizer

    def lose_optimizer(self, rank: int) -> None:
        """Let this rank optimize what is in no model."""
        if rank == self.rank:
            self.state["optimizer"] = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(3))])

    def part(self, name: str) -> Any:
        return self.state[name]

    def limit(self, rank: int, size: int) -> None:
        """Let this rank write no file larger than that: the kernel refuses."""
        import resource

        if rank == self.rank:
            resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))

    def unlimit(self) -> None:
        self.limit(self.rank, -1)

    def save_and_leave_group(self) -> None:
        self.checkpoints.save(self.step, self.state)
        dist.destroy_process_group()

    def load(self, strict: bool = True) -> dict[str, Any]:
        """By names and digests."""
        return digests(self.checkpoints.load(strict=strict).state)

    # ── what it is now ───────────────────────────────────────────────────────────────────────────────────────────────

    def print(self) -> dict[str, Any]:
        """This rank's share of everything that training depends on, to the bit."""
        generator = torch.Generator()
        generator.set_state(torch.get_rng_state())
        python = random.Random()
        python.setstate(random.getstate())
        moments = {
            f"{at}.{key}": value
            for at, parameter in enumerate(self.model.parameters())
            for key, value in self.optimizer.state.get(parameter, {}).items()
        }
        return {
            **digests(dict(self.model.named_parameters()), "model."),
            **digests(dict(self.model.named_buffers()), "model."),
            **digests(moments, "optimizer."),
            "step": self.step,
            "lr": (self.schedule.last_epoch, [group["lr"] for group in self.optimizer.param_groups]),
            "sampler": self.sampler.position,
            "next random numbers": (torch.rand(3, generator=generator).tolist(), python.random()),
        }

    def whole(self) -> dict[str, Any]:
        """The model and the optimizer of all ranks together, by names that depend on no number of ranks."""
        from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

        model, optimizer = get_state_dict(self.model, self.optimizer, options=StateDictOptions(full_state_dict=True))
        return digests({"model": model, "optimizer": optimizer})

    def own(self) -> tuple[int, int]:
        """What is kept for each rank: where its sampler stands, and its schedule."""
        return self.sampler.position, self.schedule.last_epoch


class Held(torchloom.Checkpoints):
    """Whose writer stops half-way, once."""

    gate: Path | None = None

    def _write(self, saving: PendingSave, prepared: PreparedSave) -> None:
        gate, self.gate = self.gate, None
        super()._write(saving, HalfWay(saving, prepared, gate))


class HalfWay:
    def __init__(self, saving: PendingSave, prepared: PreparedSave, gate: Path | None) -> None:
        self._saving = saving
        self._prepared = prepared
        self._gate = gate
        self.layout = prepared.layout
        self.size = prepared.size
        self.release = prepared.release

    def write(self) -> None:
        grow = self._saving.grow

        def stop(size: int) -> None:
            grow(size)
            gate, self._gate = self._gate, None
            if gate is not None:
                os.close(os.open(gate, os.O_RDONLY))

        self._saving.grow = stop
        self._prepared.write()


def wrap(model: torch.nn.Sequential, kind: Kind) -> torch.nn.Module:
    if kind == "ddp":
        # Otherwise it sums gradients in another order from its second step on, also without a resume.
        return torch.nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)
    if kind == "fsdp1":
        from torch.distributed.fsdp import FullyShardedDataParallel

        return FullyShardedDataParallel(model, use_orig_params=True, device_id=torch.device("cpu"))
    if kind == "fsdp2":
        from torch.distributed.fsdp import fully_shard

        for layer in model:
            if isinstance(layer, torch.nn.Linear):
                fully_shard(layer)
        fully_shard(model)
    if kind == "tensor-parallel":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        parallelize_module(model, mesh, {"0": ColwiseParallel(), str(len(model) - 1): RowwiseParallel()})
    return model


def digests(tree: Any, name: str = "") -> dict[str, Any]:
    """A flat picture of nested values, each tensor as the digest of its bits."""
    if isinstance(tree, torch.Tensor):
        local = tree.to_local() if hasattr(tree, "to_local") else tree
        data = local.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes() if local.numel() else b""
        return {name: (str(local.dtype), tuple(local.shape), hashlib.sha256(data).hexdigest()[:16])}
    if isinstance(tree, Mapping):
        return {key: value for k, item in tree.items() for key, value in digests(item, f"{name}{k}.").items()}
    if isinstance(tree, list):
        return {key: value for k, item in enumerate(tree) for key, value in digests(item, f"{name}{k}.").items()}
    return {name: tree}
