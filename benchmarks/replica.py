"""A replica for benchmarks.torchft_evict: an ordinary torchft loop that writes each commit down.

python -m benchmarks.replica FOLDER PAUSE      under `loom run --torchft`, or with torchft's variables under torchrun
"""

from __future__ import annotations

import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
from torchft import Manager, ProcessGroupGloo


def main(folder: Path, pause: float) -> None:
    number, rank = os.environ["REPLICA_GROUP_ID"], int(os.environ["RANK"])
    torch.set_num_threads(1)
    model = torch.nn.Linear(64, 64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def load(state: dict[str, dict[str, object]]) -> None:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=20)),
        load_state_dict=load,
        state_dict=lambda: {"model": model.state_dict(), "optimizer": optimizer.state_dict()},
        min_replica_size=1,
        replica_id=f"bench_{number}",
        timeout=timedelta(seconds=20),
    )
    if "TORCHLOOM_LAUNCHER" in os.environ:
        import torchloom

        torchloom.attach_manager(manager)
    with (folder / f"replica{number}-{rank}").open("a", buffering=1) as commits:
        while True:
            began = time.monotonic()
            manager.start_quorum()
            model(torch.randn(8, 64)).square().mean().backward()
            for parameter in model.parameters():
                manager.allreduce(parameter.grad).wait()
            if manager.should_commit():
                optimizer.step()
                at = time.monotonic()
                count, step = manager.num_participants(), manager.current_step()
                commits.write(f"{os.getpid()} {step} {count} {manager._quorum_id} {at:.6f}\n")
            optimizer.zero_grad()
            time.sleep(max(0.0, pause - (time.monotonic() - began)))


if __name__ == "__main__":
    main(Path(sys.argv[1]), float(sys.argv[2]))
