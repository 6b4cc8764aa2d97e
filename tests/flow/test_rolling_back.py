"""A bad sample turns the loss into NaN: training goes back to before it, leaves it out, and comes to its end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

LOOM = [sys.executable, "-P", "-m", "torchloom.cli.main"]
BAD = 33
"""The sample that no training survives."""
SCRIPT = """
import json, os, sys, time
from pathlib import Path
import torch
import torch.distributed as dist
import torchloom

folder, steps, bad = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])

class Samples:
    # A loader that keeps its position, as torchdata's does.
    def __init__(self):
        self.at = 0
    def __iter__(self):
        while True:
            self.at += 1
            yield self.at
    def state_dict(self):
        return {"at": self.at}
    def load_state_dict(self, state):
        self.at = state["at"]

dist.init_process_group("gloo")
rank, attempt = dist.get_rank(), int(os.environ["TORCHELASTIC_RESTART_COUNT"]) + 1
torch.manual_seed(1)
model, loader = torch.nn.Linear(2, 1), Samples()
checkpoints = torchloom.Checkpoints(folder / "kept", every=5)
state = {"model": model, "loader": loader}
seen = (folder / f"seen-{attempt}-{rank}").open("a")
with torchloom.attach() as loom:
    step = checkpoints.resume(state)
    print(f"attempt {attempt} begins after step {step}", file=seen, flush=True)
    for number in loom.batches(loader):
        step += 1
        print(step, number, file=seen, flush=True)
        value = float("nan") if number == bad else 1.0 / number
        loss = model(torch.full((1, 2), value)).square().mean()
        model.zero_grad()
        loss.backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
            parameter.data -= 0.01 * parameter.grad
        time.sleep(0.05)
        checkpoints.save(step, state)
        loom.step(step=step, loss=loss)
        if step == steps or loom.stopping:
            break
checkpoints.close()
torch.save([parameter.detach() for parameter in model.parameters()], folder / f"end-{rank}.pt")
dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_bad_batch_is_left_out_on_all_ranks_and_training_comes_to_its_end(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    env = {k: v for k, v in os.environ.items() if not k.startswith("TORCHLOOM_")}
    env |= {"TORCHLOOM_STATE": str(tmp_path / "state"), "OMP_NUM_THREADS": "1"}
    words = ["run", "--nproc-per-node", "2", "--on", "not_finite=rollback,skip", "--checkpoint-dir", "kept"]
    ended = subprocess.run(
        [*LOOM, *words, "train.py", str(tmp_path), "80", str(BAD)], env=env, cwd=tmp_path, capture_output=True,
        text=True, timeout=250,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert not (tmp_path / "seen-3-0").exists(), "one rollback was enough"
    told = []
    for rank in range(2):
        lines = (tmp_path / f"seen-2-{rank}").read_text().splitlines()
        told.append([tuple(map(int, line.split())) for line in lines[1:]])
        assert all(bool(torch.isfinite(value).all()) for value in torch.load(tmp_path / f"end-{rank}.pt"))
    assert told[0] == told[1]
    steps, numbers = zip(*told[0], strict=True)
    first = steps[0]
    assert first < BAD, "it went back to before the bad sample"
    assert steps == tuple(range(first, 81)), "and made every step"
    assert BAD not in numbers
    dropped = sorted(set(range(first, numbers[-1] + 1)) - set(numbers))
    assert dropped == list(range(dropped[0], dropped[-1] + 1)), "what was left out is one piece, and nothing else is"
    listed = subprocess.run(
        [*LOOM, "checkpoints", "./kept", "-o", "json"],
        env=env,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=30,
    )
    found = json.loads(listed.stdout)
    assert found["resume"] == "step-80"
    back = {entry["step"] for entry in found["checkpoints"] if entry["status"] == "rolled back"}
    assert all(step > dropped[0] - 1 for step in back)
