"""Loaders of two ranks under `loom run`, one of which is killed: the job resumes at the same sample."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import psutil
import pytest

SCRIPT = """
import os, signal
from pathlib import Path
import torch, torch.distributed as dist
from torch.utils.data import DistributedSampler, TensorDataset
import torchloom
from torchloom.data import ElasticLoader

dist.init_process_group("gloo")
loom = torchloom.attach()
data = TensorDataset(torch.arange(240.0).reshape(240, 1))
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1, 1))
optimizer = torch.optim.SGD(model.parameters(), 1e-9)
loader = ElasticLoader(data, batch_size=4, sampler=DistributedSampler(data), num_workers=2)
state = {"model": model, "loader": loader}
checkpoints = torchloom.Checkpoints("checkpoints", every=5)
step = checkpoints.resume(state)
for (batch,) in loader:
    optimizer.zero_grad()
    loss = model(batch).mean()
    loss.backward()
    optimizer.step()
    step += 1
    with open(f"seen-{dist.get_rank()}", "a") as file:
        print(step, batch.flatten().int().tolist(), file=file, sep=":")
    loom.step(loss=loss, samples=len(batch))
    checkpoints.save(step, state)
    if step == 13 and "LAST" not in os.environ and dist.get_rank() == 1 and not Path("died").exists():
        checkpoints.wait(60)
        Path("died").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    if step == int(os.environ.get("LAST", "-1")):
        break
checkpoints.close()
"""


def loom_run(folder: Path, ranks: int, **environ: str) -> None:
    script = folder / "train_with_loaders.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "torchloom.cli.main", "run", "--nproc-per-node", str(ranks), "--max-restarts", "2"]
    ended = subprocess.run(
        [*command, "--checkpoint-dir", "checkpoints", script.name],
        cwd=folder,
        env={**os.environ, "TORCHLOOM_STATE": str(folder / "state"), **environ},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert ended.returncode == 0, ended.stderr + ended.stdout


def lines(folder: Path, rank: int) -> list[tuple[int, str]]:
    """What a rank has seen: steps, and the indices of their batches."""
    parts = [line.partition(":") for line in (folder / f"seen-{rank}").read_text().splitlines()]
    return [(int(step), indices) for step, _, indices in parts]


@pytest.mark.long
def test_a_killed_rank_resumes_at_the_same_sample_and_leaves_no_loader(tmp_path: Path) -> None:
    loom_run(tmp_path, 2)
    assert (tmp_path / "died").exists()
    seen: dict[tuple[int, int], set[str]] = defaultdict(set)
    for rank in range(2):
        for step, indices in lines(tmp_path, rank):
            seen[rank, step].add(indices)
    assert all(len(batches) == 1 for batches in seen.values()), "what was trained twice is the same"
    assert sorted(index for (batch,) in seen.values() for index in ast.literal_eval(batch)) == list(range(240))
    left = [p for p in psutil.process_iter(["cmdline"]) if "train_with_loaders.py" in (p.info["cmdline"] or [])]
    assert psutil.wait_procs(left, timeout=60)[1] == []


@pytest.mark.long
def test_another_number_of_ranks_goes_on_with_the_epoch(tmp_path: Path) -> None:
    loom_run(tmp_path, 2, LAST="10")
    before = [lines(tmp_path, rank) for rank in range(2)]
    loom_run(tmp_path, 3, LAST="-1")
    after = [[line for line in lines(tmp_path, rank) if rank == 2 or line not in before[rank]] for rank in range(3)]
    assert [len(each) for each in before] == [10, 10]
    assert [[step for step, _ in each] for each in after] == [list(range(11, 25))] * 3, "54 samples each"
    used = [index for each in (*before, *after) for _, batch in each for index in ast.literal_eval(batch)]
    assert set(used) == set(range(240))
    assert len(used) == 242, "160 are left for three ranks"
