"""Train with torchft's LocalSGD: each replica trains alone for a while, then all average their parameters.

    REPLICA_GROUP_ID=0 TORCHFT_LIGHTHOUSE=http://localhost:29510 python examples/train_localsgd.py
    REPLICA_GROUP_ID=1 TORCHFT_LIGHTHOUSE=http://localhost:29510 python examples/train_localsgd.py
    loom set train_localsgd sync_every=64         # all replicas exchange less often, starting at the same exchange

torchft and torchLoom count one exchange as one step.
"""

import argparse
import os
import sys
import time
from datetime import timedelta

import torch
from torch import nn
from torch.distributed import TCPStore
from torchft import Manager, ProcessGroupGloo
from torchft.local_sgd import LocalSGD

import torchloom

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--steps", type=int, default=200, help="number of exchanges")
parser.add_argument("--step-seconds", type=float, default=0.0, help="minimum duration of a step")
parser.add_argument("--sync-every", type=int, default=16, help="batches between two exchanges")
parser.add_argument("--lr", type=float, default=0.05)
parser.add_argument("--log-interval", type=int, default=10, help="exchanges between two printed lines")
args = parser.parse_args()

torch.set_num_threads(1)  # the replicas share this machine's cores
group = int(os.environ.get("REPLICA_GROUP_ID", "0"))
store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)

torch.manual_seed(1)
model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=args.lr)
manager = Manager(
    pg=ProcessGroupGloo(timeout=timedelta(seconds=10)),
    load_state_dict=model.load_state_dict,
    state_dict=model.state_dict,
    min_replica_size=1,
    replica_id=f"train_localsgd_{group}",
    store_addr="localhost",
    store_port=store.port,
    rank=0,
    world_size=1,
    timeout=timedelta(seconds=10),
)
loom = torchloom.attach_manager(manager)
loom.watch(optimizer)
sync_every = loom.knob("sync_every", args.sync_every, low=1, high=10_000, unit="batches", help="between two exchanges")

chance = torch.Generator().manual_seed(group)  # every replica has different data
with LocalSGD(manager, model, optimizer, sync_every=sys.maxsize) as local:  # the loop below decides when to sync
    while manager.current_step() < args.steps and not loom.stopping:
        began = time.monotonic()
        for _ in range(sync_every.value):
            x = torch.randn(32, 16, generator=chance)
            loss = (model(x) - x.sin().sum(1, keepdim=True)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        time.sleep(max(0.0, began + args.step_seconds - time.monotonic()))
        local.sync()
        loom.step(loss=loss, samples=32 * sync_every.value)
        if manager.current_step() % args.log_interval == 0:
            replicas = manager.num_participants()
            print(f"step {manager.current_step():4d}  loss {loss.item():.4f}  replicas {replicas}", flush=True)

print(f"replica {group} ends after {manager.current_step()} steps", flush=True)
loom.close()
manager.shutdown(wait=False)
