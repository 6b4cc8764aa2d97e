"""Train with torchft: when a replica dies, the others continue to train (data parallel on gloo, no GPU needed).

    loom lighthouse --job train_ddp &                       # or torchft's own: torchft_lighthouse --min_replicas 1
    REPLICA_GROUP_ID=0 NUM_REPLICA_GROUPS=2 TORCHFT_LIGHTHOUSE=http://localhost:29510 python examples/train_ddp.py
    REPLICA_GROUP_ID=1 NUM_REPLICA_GROUPS=2 TORCHFT_LIGHTHOUSE=http://localhost:29510 python examples/train_ddp.py
    loom set train_ddp lr=0.01                              # on all replicas at the same step

A replica may also have several ranks: `torchrun --nproc-per-node 2 examples/train_ddp.py`. Without a control plane the
script trains in the same way.
"""

import argparse
import os
import time
from datetime import timedelta

import torch
from torch import nn
from torch.distributed import TCPStore
from torchft import Manager, Optimizer, ProcessGroupGloo

import torchloom

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--steps", type=int, default=2000)
parser.add_argument("--step-seconds", type=float, default=0.0, help="minimum duration of a step")
parser.add_argument("--min-replicas", type=int, default=1, help="replicas that are needed to commit a step")
parser.add_argument("--lr", type=float, default=0.05)
parser.add_argument("--log-interval", type=int, default=100, help="steps between two printed lines")
parser.add_argument("--checkpoints", default=None, metavar="FOLDER", help="folder to save to and resume from")
parser.add_argument("--every", type=int, default=500, help="steps between two checkpoints")
args = parser.parse_args()

torch.set_num_threads(1)  # the replicas share this machine's cores
group, groups = int(os.environ.get("REPLICA_GROUP_ID", "0")), int(os.environ.get("NUM_REPLICA_GROUPS", "1"))
rank, ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))

# The ranks of a replica find each other in a store. torchrun provides one; elsewhere rank 0 creates it.
host, port = os.environ.get("MASTER_ADDR", "localhost"), int(os.environ.get("MASTER_PORT", "0"))
if rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
    store = TCPStore(host, port, is_master=True, wait_for_workers=False)
    port = store.port

torch.manual_seed(1)
model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 1))
sgd = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)


def state() -> dict:
    return {"model": model.state_dict(), "optimizer": sgd.state_dict()}


def load(state: dict) -> None:
    model.load_state_dict(state["model"])
    sgd.load_state_dict(state["optimizer"])


manager = Manager(
    pg=ProcessGroupGloo(timeout=timedelta(seconds=10)),
    load_state_dict=load,
    state_dict=state,
    min_replica_size=args.min_replicas,
    replica_id=f"train_ddp_{group}",
    store_addr=host,
    store_port=port,
    rank=rank,
    world_size=ranks,
    timeout=timedelta(seconds=10),
)


def average_gradients() -> None:
    """Average across the replicas. If one dies meanwhile, no error is raised: the step is not committed and is retried.

    torchft's own DistributedDataParallel does this while backward still runs, but version 0.2 raises when it fails.
    """
    for work in [manager.allreduce(parameter.grad) for parameter in model.parameters()]:
        work.wait()


loom = torchloom.attach_manager(manager)  # from here on torchLoom sees this replica and counts its steps
loom.watch(sgd)  # lr and momentum can be changed while it trains

optimizer = Optimizer(manager, sgd)
kept = {"model": model, "optimizer": sgd, "manager": manager}
checkpoints = torchloom.Checkpoints(f"{args.checkpoints}/{group}", every=args.every) if args.checkpoints else None
if checkpoints:
    checkpoints.resume(kept)

while manager.current_step() < args.steps and not loom.stopping:  # becomes true after the same step on all ranks
    began = time.monotonic()
    step = manager.current_step()
    chance = torch.Generator().manual_seed((step * groups + group) * ranks + rank)
    x = torch.randn(32, 16, generator=chance)
    optimizer.zero_grad()  # asks for a quorum
    loss = (model(x) - x.sin().sum(1, keepdim=True)).square().mean()
    loss.backward()
    average_gradients()
    optimizer.step()  # commits the step, or discards it and tries again
    time.sleep(max(0.0, began + args.step_seconds - time.monotonic()))
    loom.step(loss=loss, samples=len(x))  # optional; reports loss and samples
    if manager.current_step() > step and rank == 0:
        if checkpoints:
            checkpoints.save(manager.current_step(), kept)
        if manager.current_step() % args.log_interval == 0:
            print(f"step {step + 1:5d}  loss {loss.item():.4f}  replicas {manager.num_participants()}", flush=True)

print(f"replica {group} ends after {manager.current_step()} steps", flush=True)
loom.close()
manager.shutdown(wait=False)
