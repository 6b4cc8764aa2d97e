"""Train a small model on synthetic data in several processes, without a line of torchLoom.

    loom run --nproc-per-node 2 --max-restarts 3 --checkpoint-dir runs/a examples/simulated_training.py \\
        --epochs 20 --steps 30 --checkpoint-interval 10 --checkpoint-dir runs/a
    torchrun --nproc-per-node 2 examples/simulated_training.py --epochs 20 --steps 30

The script runs under `loom run` and torchrun alike. Kill a process while it trains: `loom run` restarts all of them
from the newest valid checkpoint, and the final parameters are bit-identical to those of an undisturbed run.
"""

import argparse
import hashlib
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--epochs", type=int, default=20)
parser.add_argument("--steps", type=int, default=30, help="steps per epoch")
parser.add_argument("--step-seconds", type=float, default=0.0, help="minimum duration of a step")
parser.add_argument(
    "--checkpoint-interval", "--checkpoint_interval", type=int, default=10, metavar="N", help="in steps"
)
parser.add_argument("--checkpoint-dir", "--checkpoint_dir", type=Path, default=Path("checkpoints"), metavar="FOLDER")
parser.add_argument(
    "--resume_from_checkpoint", "--resume-from-checkpoint", metavar="PATH",
    default=os.environ.get("TORCHLOOM_RESUME_FROM", ""),  # `loom run` puts the newest valid checkpoint here
    help="checkpoint to resume from",
)  # fmt: skip
args = parser.parse_args()


class SimpleModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.layers(inputs)


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The data of this rank for a step. It depends only on rank and step, so a repeated step is the same."""
    chance = torch.Generator().manual_seed(step * world + rank)
    inputs = torch.randn(32, 10, generator=chance)
    return inputs, inputs.sum(1, keepdim=True).sin() + 0.1 * torch.randn(32, 1, generator=chance)


def average_gradients() -> None:
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= world


def save(step: int, epoch: int) -> None:
    """Rank 0 writes a hidden file and renames it, so a killed process leaves no partial checkpoint."""
    dist.barrier()
    if rank == 0:
        path = args.checkpoint_dir / f"checkpoint_step_{step}.pt"
        beside = path.with_name(f".{path.name}.writing")
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch, "step": step}
        with beside.open("wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    dist.barrier()


def digest() -> str:
    """A hash of the parameters."""
    content = (parameter.detach().flatten().view(torch.uint8).tolist() for parameter in model.parameters())
    return hashlib.sha256(b"".join(map(bytes, content))).hexdigest()


torch.set_num_threads(1)  # the ranks share this machine's cores
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
args.checkpoint_dir.mkdir(parents=True, exist_ok=True)

torch.manual_seed(1)  # every rank starts with the same parameters
model = SimpleModel()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

first = 0
if args.resume_from_checkpoint:
    state = torch.load(args.resume_from_checkpoint, weights_only=True)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    first = state["step"]
    print(f"rank {rank} resumes after step {first} from {args.resume_from_checkpoint}", flush=True)
    dist.barrier()

for step in range(first + 1, args.epochs * args.steps + 1):
    began = time.monotonic()
    epoch = (step - 1) // args.steps + 1
    inputs, targets = batch(step)
    loss = nn.functional.mse_loss(model(inputs), targets)
    optimizer.zero_grad()
    loss.backward()
    average_gradients()
    optimizer.step()
    time.sleep(max(0.0, began + args.step_seconds - time.monotonic()))
    if step % args.checkpoint_interval == 0:
        save(step, epoch)
        if rank == 0:
            print(f"epoch {epoch}  step {step}  loss {loss.item():.4f}", flush=True)

dist.barrier()  # no rank leaves while another still communicates with it
dist.destroy_process_group()
print(f"rank {rank} ends with parameters {digest()}", flush=True)
