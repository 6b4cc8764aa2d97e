"""One of four DDP ranks whose steps take 20 ms: a real exchange of gradients on gloo, and sleep for the rest.

It writes when (CLOCK_MONOTONIC, common to all processes of a machine) each step was finished, and when and at which
step the value in force changed: `step` and `x` lines; at the end, what a look at the value cost: `cost`. How the value
comes to it is what differs:

    loom        a knob of torchLoom
    file        each rank looks at a JSON file once a second, as DLRover's agents do
    broadcast   rank 0 looks at the file and broadcasts what it says, at every step
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import torchloom

STEP_SECONDS = 0.02
POLL_SECONDS = 1.0


def main(how: str, folder: str, rank: int, world: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
    model = DistributedDataParallel(torch.nn.Linear(256, 64))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loom = torchloom.attach("bench", "control", rank=rank, world_size=world)
    knob = loom.knob("x", 0.0)
    file = Path(folder) / "value.json"
    read: Callable[[int], float] = {
        "loom": lambda _: float(knob.value),
        "file": Polled(file, rank / world),
        "broadcast": lambda _: broadcast(file, rank),
    }[how]
    inputs = torch.randn(16, 256)
    seen, step, costs = 0.0, 0, []
    due = time.monotonic()
    with (Path(folder) / f"rank{rank}").open("w", buffering=1) as log:
        while not loom.stopping:
            model(inputs).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            due = max(due + STEP_SECONDS, time.monotonic())
            time.sleep(max(0.0, due - time.monotonic()))
            log.write(f"step {step} {time.monotonic():.6f}\n")
            loom.step()
            before = time.perf_counter()
            value = read(step)
            costs.append(time.perf_counter() - before)
            if value != seen:
                seen = value
                log.write(f"x {step} {time.monotonic():.6f} {value}\n")
        log.write(f"cost {statistics.median(costs):.9f}\n")
    dist.barrier()


class Polled:
    """The file's value as of the last look; the ranks of a job do not look at the same moment."""

    def __init__(self, file: Path, phase: float) -> None:
        self._file = file
        self._next = time.monotonic() + POLL_SECONDS * phase
        self._value = 0.0

    def __call__(self, _step: int) -> float:
        if time.monotonic() >= self._next:
            self._next += POLL_SECONDS
            self._value = stored(self._file)
        return self._value


def broadcast(file: Path, rank: int) -> float:
    value = torch.tensor([stored(file) if rank == 0 else 0.0], dtype=torch.float64)
    dist.broadcast(value, 0)
    return float(value)


def stored(file: Path) -> float:
    return float(json.loads(file.read_text())["x"]) if file.exists() else 0.0


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
