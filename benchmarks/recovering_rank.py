"""A rank to be killed and started again: DDP on gloo, a checkpoint now and then, steps of 20 ms, whoever launches it.

It finds its newest checkpoint itself. Told to by a file FOLDER/hold-N, rank N holds the interpreter in C for good, as a
library does that forgets to release it. After each step it writes its pid, the step and the time (CLOCK_MONOTONIC,
common to all processes of a machine) to FOLDER/rankN, so that all launchers are measured by one clock in one place.
"""

from __future__ import annotations

import ctypes
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

STEP_SECONDS = 0.02
EVERY = 10


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(1)
    model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.Linear(256, 16)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    step = 0
    if newest := max(folder.glob("checkpoint_step_*.pt"), key=step_of, default=None):
        state = torch.load(newest, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        step = state["step"]
    inputs = torch.randn(16, 256)
    order = folder / f"hold-{rank}"
    with (folder / f"rank{rank}").open("a", buffering=1) as log:
        while True:
            time.sleep(STEP_SECONDS)
            model(inputs).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            log.write(f"{os.getpid()} {step} {time.monotonic():.6f}\n")
            if step % EVERY == 0 and rank == 0:
                path = folder / f"checkpoint_step_{step}.pt"
                beside = path.with_suffix(".writing")
                torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, beside)
                beside.replace(path)
            if order.exists():
                order.unlink()
                hold()


def hold() -> None:
    """Wait for ever without giving up the interpreter, and without using the processor."""
    ctypes.PyDLL(None).read(os.pipe()[0], ctypes.create_string_buffer(1), 1)


def step_of(path: Path) -> int:
    return int(path.stem.rpartition("_")[2])


if __name__ == "__main__":
    main(Path(sys.argv[1]))
