"""Train an architecture of the catalog on synthetic images. The rows of a workload file run this script.

    python -m torchloom.workloads.train --arch resnet --depth 10 --batch 64 --workers 4 --end-iter 200 --scale 0.1
    loom run --nproc-per-node 2 -m torchloom.workloads.train --arch vgg --depth 61 --batch 33 --end-iter 50 --scale 0.1

It runs as one process, and under `loom run` and torchrun. The batch and the loader processes are those of all ranks
together. If it is killed and started again, it resumes from its newest valid checkpoint and ends with the same losses.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from torchloom.checkpoints.api import Checkpoints
from torchloom.data import ElasticLoader
from torchloom.errors import BadInput
from torchloom.shared.division import share
from torchloom.threadlet.threadlet import attach
from torchloom.workloads.architectures import build, image_size
from torchloom.workloads.synthetic_images import BatchShares, SyntheticImages


@dataclass(frozen=True)
class Position:
    """This process among the ranks of the job."""

    rank: int
    ranks: int
    device: torch.device


def parse_arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m torchloom.workloads.train", description=__doc__.partition("\n")[0])
    parser.add_argument("--arch", default="resnet", help="architecture; docs/workloads.md lists them")
    parser.add_argument("--depth", type=int, default=10, help="its depth, or its code")
    parser.add_argument("--batch", type=int, default=64, help="samples of a step, of all ranks together")
    parser.add_argument("--workers", type=int, default=0, help="loader processes of all ranks together")
    parser.add_argument("--output-folder", type=Path, default=Path("trace/example"), help="folder for the checkpoints")
    parser.add_argument("--start-iter", type=int, default=0, help="iterations of the first epoch that are left out")
    parser.add_argument("--start-epoch", type=int, default=1)
    parser.add_argument("--end-iter", type=int, default=100, help="iterations of an epoch")
    parser.add_argument("--end-epoch", type=int, default=1, help="the last epoch")
    parser.add_argument("--scale", type=float, default=1.0, help="part of the full widths and of the image size")
    parser.add_argument("--classes", type=int, default=1000)
    parser.add_argument("--sample-seconds", type=float, default=0.002, help="time that loading a sample waits")
    parser.add_argument("--decode-passes", type=int, default=1, help="work to decode a sample")
    parser.add_argument("--lr", type=float, default=0.01)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--checkpoint-every", type=int, default=100, help="steps between two checkpoints")
    parser.add_argument("--log-every", type=int, default=50, help="steps between two printed lines")
    return parser.parse_args(words)


def count_steps(args: argparse.Namespace) -> int:
    """An epoch has `end_iter` steps, and the first one begins after `start_iter`."""
    steps = (args.end_epoch - args.start_epoch + 1) * args.end_iter - args.start_iter
    if not 0 <= args.start_iter < args.end_iter or args.end_epoch < args.start_epoch:
        raise BadInput(f"there are {steps} steps", hint="0 <= start-iter < end-iter, and start-epoch <= end-epoch")
    return int(steps)


def join_ranks() -> Position:
    """Meet the other ranks, if the environment names any."""
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    gpu = torch.cuda.is_available()
    if ranks > 1:
        dist.init_process_group("nccl" if gpu else "gloo")
    local = int(os.environ.get("LOCAL_RANK", "0"))
    device = torch.device("cuda", local % torch.cuda.device_count()) if gpu else torch.device("cpu")
    return Position(int(os.environ.get("RANK", "0")) if ranks > 1 else 0, ranks, device)


def make_loader(args: argparse.Namespace, steps: int, position: Position) -> ElasticLoader[Any]:
    """The share of this rank. The dataset is as long as an epoch needs, however many iterations that has."""
    pixels = image_size(args.arch, args.depth, args.scale)
    images = SyntheticImages(args.end_iter * args.batch, pixels, args.classes, args.sample_seconds, args.decode_passes)
    shares = BatchShares(
        steps, args.end_iter, args.batch,
        first_step=args.start_iter, rank=position.rank, ranks=position.ranks, seed=args.seed,
    )  # fmt: skip
    return ElasticLoader(
        images,
        shares.size,
        sampler=shares,
        num_workers=share(args.workers, position.ranks, position.rank),
        pin_memory=position.device.type == "cuda",
        generator=torch.Generator().manual_seed(args.seed),
    )


def sum_over_ranks(position: Position, *numbers: torch.Tensor) -> list[torch.Tensor]:
    together = torch.stack([number.detach().float() for number in numbers])
    if position.ranks > 1:
        dist.all_reduce(together)
    return list(together)


def train(args: argparse.Namespace) -> None:
    steps = count_steps(args)
    position = join_ranks()
    if args.batch < position.ranks:
        raise BadInput(f"batch {args.batch} for {position.ranks} ranks", hint="each rank needs a sample")
    torch.backends.cudnn.deterministic = True  # the same seed gives the same bits
    torch.manual_seed(args.seed)
    model: nn.Module = build(args.arch, args.depth, args.classes, args.scale).to(position.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    if position.ranks > 1:
        model = nn.parallel.DistributedDataParallel(model)
    loader = make_loader(args, steps, position)
    checkpoints = Checkpoints(args.output_folder / "checkpoints", every=args.checkpoint_every, keep=2)
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "data": loader, "losses": "", "samples": 0}
    with attach() as loom:
        loom.watch(optimizer, scheduler)
        loom.watch(loader)
        step = checkpoints.resume(state)
        if step and not position.rank:
            print(f"resumes after step {step}", flush=True)
        loss = torch.zeros(())
        for images, labels in loader:
            outputs = model(images.to(position.device))
            own = nn.functional.cross_entropy(outputs, labels.to(position.device), reduction="sum")
            total, samples = sum_over_ranks(position, own, torch.tensor(len(labels), device=position.device))
            optimizer.zero_grad()
            # The mean over samples: DistributedDataParallel takes that over ranks, which may have unequal shares.
            (own * position.ranks / samples).backward()
            optimizer.step()
            scheduler.step()
            step += 1
            loss = total / samples
            digest = hashlib.sha256(f"{state['losses']}".encode() + struct.pack("<f", loss.item()))
            state["losses"] = digest.hexdigest()
            state["samples"] += int(samples)
            loom.step(
                loss=loss, samples=len(labels), epoch=args.start_epoch + (args.start_iter + step - 1) // args.end_iter
            )
            checkpoints.save(step, state)
            if not position.rank and step % args.log_every == 0:
                print(f"step {step} of {steps}  loss {loss.item():.4f}", flush=True)
            if loom.stopping:
                break
    checkpoints.close()
    if not position.rank:
        print(f"finished {step} steps, {state['samples']} samples, losses {state['losses']}", flush=True)
    if position.ranks > 1:
        dist.barrier()  # no rank leaves while another still communicates with it
        dist.destroy_process_group()


if __name__ == "__main__":
    train(parse_arguments())
