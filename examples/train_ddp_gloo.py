"""Train an image classifier in several processes that average their gradients (DDP on gloo, no GPU needed).

    torchrun --nproc-per-node 4 examples/train_ddp_gloo.py --checkpoints runs/a
    loom set train_ddp_gloo lr=0.01 batch_size=32        # all ranks apply it at the same step
    loom checkpoint train_ddp_gloo                       # all ranks save their part at the same step

When started again, it resumes from the newest valid checkpoint, with any number of processes.

Under another launcher set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT. The images are generated digits of a
seven-segment display. They depend only on the step and the rank, so the same steps give bit-identical results.
"""

import argparse
import contextlib
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import torchloom

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--job", default=None, help="name of the job (default: TORCHLOOM_JOB, else this file's name)")
parser.add_argument("--steps", type=int, default=2000)
parser.add_argument("--step-seconds", type=float, default=0.0, help="minimum duration of a step")
parser.add_argument("--batch-size", type=int, default=16, help="images per rank and backward pass")
parser.add_argument("--lr", type=float, default=0.05)
parser.add_argument("--log-interval", type=int, default=20, help="steps between two printed lines")
parser.add_argument("--checkpoints", default=None, metavar="FOLDER", help="folder to save to and resume from")
parser.add_argument("--every", type=int, default=500, help="steps between two checkpoints")
parser.add_argument("--save", default=None, metavar="PATH", help="write the parameters of each rank to PATH.rankN")
args = parser.parse_args()

torch.set_num_threads(1)  # the ranks share this machine's cores
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()

# Which of the segments  top, upper left, upper right, middle, lower left, lower right, bottom  are lit in 0 to 9.
LIT = ["1110111", "0010010", "1011101", "1011011", "0111010", "1101011", "1101111", "1010010", "1111111", "1111011"]
SEGMENTS = [  # rows and columns of each in a 16 × 10 drawing
    (slice(0, 2), slice(1, 9)), (slice(1, 8), slice(0, 2)), (slice(1, 8), slice(8, 10)), (slice(7, 9), slice(1, 9)),
    (slice(8, 15), slice(0, 2)), (slice(8, 15), slice(8, 10)), (slice(14, 16), slice(1, 9)),
]  # fmt: skip
clean = torch.zeros(10, 16, 10)
for digit, lit in enumerate(LIT):
    for (rows, columns), on in zip(SEGMENTS, lit, strict=True):
        clean[digit, rows, columns] = clean[digit, rows, columns].clamp(min=float(on))


def draw(step: int, part: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Images of this rank for one part of a step, shifted and with noise."""
    chance = torch.Generator().manual_seed((step * 1000 + part) * world + rank)
    digits = torch.randint(10, (count,), generator=chance)
    images = 0.6 * torch.randn(count, 1, 20, 16, generator=chance)
    for image, digit, (top, left) in zip(images, digits, torch.randint(5, (count, 2), generator=chance), strict=True):
        image[0, top : top + 16, left : left + 10] += clean[digit]
    return images, digits


torch.manual_seed(1)
model = DistributedDataParallel(
    nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(8 * 10 * 8, 10))
)
optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=args.steps)

with torchloom.attach(args.job, rank=rank, world_size=world) as loom:
    # Values that can be changed while this runs. A value changes inside loom.step(), on all ranks at the same step.
    loom.watch(optimizer, scheduler)
    batch_size = loom.knob("batch_size", args.batch_size, low=1, high=4096, unit="images", help="per rank and pass")
    accumulation = loom.accumulation(1)
    clip = loom.clip(10.0)

    # The interval is a knob, and `loom checkpoint` works without further code. The values above are saved too.
    checkpoints = torchloom.Checkpoints(args.checkpoints, every=args.every, keep=3) if args.checkpoints else None
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    first = checkpoints.resume(state) if checkpoints else 0

    for step in range(first + 1, args.steps + 1):
        began = time.monotonic()
        for part in range(accumulation.value):
            images, digits = draw(step, part, batch_size.value)
            # Gradients are exchanged once a step, with the last part, so no rank waits if the number of parts changes.
            last = part == accumulation.value - 1
            with contextlib.nullcontext() if last else model.no_sync():
                loss = nn.functional.cross_entropy(model(images), digits) / accumulation.value
                loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), clip.value)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        time.sleep(max(0.0, began + args.step_seconds - time.monotonic()))
        if rank == 0 and step % args.log_interval == 0:
            total = loss.item() * accumulation.value
            print(f"step {step:5d}  loss {total:.4f}  lr {scheduler.get_last_lr()[0]:.4g}", flush=True)
        loom.step(loss=loss, samples=batch_size.value * accumulation.value)
        if checkpoints:
            checkpoints.save(step, state)  # copies and returns; the file is written in the background
        if loom.stopping:  # on all ranks after the same step
            break

if args.save:
    torch.save(model.module.state_dict(), f"{args.save}.rank{rank}")
dist.barrier()  # no rank leaves while another still communicates with it
dist.destroy_process_group()
