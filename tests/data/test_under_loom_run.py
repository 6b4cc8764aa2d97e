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
    if step == 13 and dist.get_rank() == 1 and not Path("died").exists():
        checkpoints.wait(60)
        Path("died").touch()
        os.kill(os.getpid(), signal.SIGKILL)
checkpoints.close()
"""


@pytest.mark.long
def test_a_killed_rank_resumes_at_the_same_sample_and_leaves_no_loader(tmp_path: Path) -> None:
    script = tmp_path / "train_with_loaders.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "torchloom.cli.main", "run", "--nproc-per-node", "2", "--max-restarts", "2"]
    ended = subprocess.run(
        [*command, "--checkpoint-dir", "checkpoints", script.name],
        cwd=tmp_path,
        env={**os.environ, "TORCHLOOM_STATE": str(tmp_path / "state")},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert ended.returncode == 0, ended.stderr + ended.stdout
    assert (tmp_path / "died").exists()
    seen: dict[tuple[int, int], set[str]] = defaultdict(set)
    for rank in range(2):
        for line in (tmp_path / f"seen-{rank}").read_text().splitlines():
            step, _, indices = line.partition(":")
            seen[rank, int(step)].add(indices)
    assert all(len(batches) == 1 for batches in seen.values()), "what was trained twice is the same"
    assert sorted(index for (batch,) in seen.values() for index in ast.literal_eval(batch)) == list(range(240))
    left = [process for process in psutil.process_iter(["cmdline"]) if script.name in (process.info["cmdline"] or [])]
    assert psutil.wait_procs(left, timeout=60)[1] == []
