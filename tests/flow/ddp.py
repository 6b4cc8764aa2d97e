"""Ranks that train together: DDP on gloo, forked from a server that has torch imported, so they start in a blink.

Each rank writes down which value it saw at which step, and at the end what its parameters are: what the tests compare.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.fork_server import FORKS
from torchloom.settings import Settings

PATIENCE = 90.0
CALM = {"verdict_seconds": 20.0, "goodbye_seconds": 20.0}
"""So that what is agreed on, and what is said at the end, survives a pause of anyone."""
KNOBS = ("lr", "batch_size", "accumulation", "x")


@dataclass(frozen=True)
class Plan:
    """What the ranks of a group are to do."""

    state: str
    """The state folder of the control plane."""
    folder: Path
    """Where they write what they saw."""
    size: int = 4
    job: str = "job"
    replica: str = "hi"
    steps: int = 100_000
    step_seconds: float = 0.01
    resume_at: int = 0
    settings: dict[str, Any] = field(default_factory=dict)
    addresses: dict[int, tuple[str, str]] = field(default_factory=dict)
    """Server address and credentials for ranks that are to go another way."""


def train(plan: Plan, rank: int) -> None:
    """One rank, from beginning to end."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    from torchloom.threadlet.threadlet import attach

    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{plan.folder}/store", rank=rank, world_size=plan.size)
    torch.manual_seed(1)
    model = DistributedDataParallel(torch.nn.Linear(8, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    addr, creds = plan.addresses.get(rank, ("", ""))
    settings = Settings(state=plan.state, addr=addr, creds=creds, **CALM | plan.settings)
    seen: dict[str, Any] = {}
    with (
        (plan.folder / f"rank{rank}.log").open("a", buffering=1) as log,
        attach(plan.job, plan.replica, rank=rank, world_size=plan.size, settings=settings) as loom,
    ):

        def look(step: int) -> None:
            for name in KNOBS:
                value = loom.knobs[name].read()
                if value != seen.get(name):
                    seen[name] = value
                    log.write(json.dumps({"step": step, "name": name, "value": value}) + "\n")

        @loom.on_checkpoint
        def save(step: int) -> str:
            path = plan.folder / f"step-{step}.json"
            if rank == 0:
                path.write_text(json.dumps(loom.state_dict()))
            dist.barrier()
            return str(path) if rank == 0 else ""

        loom.watch(optimizer)
        batch_size = loom.knob("batch_size", 4, low=1, high=64)
        accumulation = loom.accumulation(1)
        loom.knob("x", 0.0, low=-1e9, high=1e9)
        kept = plan.folder / "resume.json"
        if kept.exists():
            loom.load_state_dict(json.loads(kept.read_text()))
        elif plan.resume_at:
            loom.resume_at(plan.resume_at)
        first = loom.step_number
        look(first)
        for step in range(first + 1, plan.steps + 1):
            began = time.monotonic()
            for part in range(accumulation.value):
                chance = torch.Generator().manual_seed((step * 100 + part) * plan.size + rank)
                inputs = torch.randn(batch_size.value, 8, generator=chance)
                model.require_backward_grad_sync = part == accumulation.value - 1
                loss = model(inputs).square().mean()
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            time.sleep(max(0.0, began + plan.step_seconds - time.monotonic()))
            loom.step(loss=loss)
            look(step)
            if loom.stopping:
                break
        content = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
        log.write(json.dumps({"step": step, "name": "end", "value": hashlib.sha256(content).hexdigest()}) + "\n")
        dist.barrier()
    dist.destroy_process_group()


class Group:
    """The processes of a group, from outside."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        plan.folder.mkdir(exist_ok=True)
        (plan.folder / "store").unlink(missing_ok=True)
        self.processes = [FORKS.Process(target=train, args=(plan, rank), daemon=True) for rank in range(plan.size)]
        for process in self.processes:
            process.start()

    def signal(self, rank: int, number: signal.Signals) -> None:
        pid = self.processes[rank].pid
        assert pid
        os.kill(pid, number)

    def saw(self, name: str) -> list[list[tuple[Any, int]]]:
        """For each rank the values of a knob, each with the step from which on it saw it."""
        found = []
        for rank in range(self.plan.size):
            file = self.plan.folder / f"rank{rank}.log"
            lines = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
            found.append([(line["value"], line["step"]) for line in lines if line["name"] == name])
        return found

    @property
    def ends(self) -> list[list[tuple[Any, int]]]:
        """For each rank a digest of its final parameters and its last step."""
        return self.saw("end")

    def exit_codes(self, seconds: float = PATIENCE) -> list[int | None]:
        deadline = time.monotonic() + seconds
        for process in self.processes:
            process.join(max(0.1, deadline - time.monotonic()))
        return [process.exitcode for process in self.processes]

    def kill(self) -> None:
        for process in self.processes:
            if process.is_alive():
                process.kill()
        for process in self.processes:
            process.join()
