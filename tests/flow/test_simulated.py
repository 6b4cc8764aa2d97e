"""A script that knows nothing of torchLoom: killed halfway under `loom run`, it ends as it would have ended."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

SCRIPT = Path(__file__).parent.parent.parent / "examples" / "simulated_training.py"
LOOM = [sys.executable, "-P", "-m", "torchloom.cli.main", "run"]
TORCHRUN = [sys.executable, "-P", "-m", "torch.distributed.run", "--standalone"]
LENGTH = ("--epochs", "2", "--steps", "30", "--checkpoint-interval", "10", "--step-seconds", "0.03")


def start(launcher: list[str], folder: Path, *options: str) -> subprocess.Popen[str]:
    folder.mkdir(exist_ok=True)
    env = {name: value for name, value in os.environ.items() if not name.startswith("TORCHLOOM_")}
    env |= {"TORCHLOOM_STATE": str(folder / "state"), "OMP_NUM_THREADS": "1"}
    script = [str(SCRIPT), *LENGTH, "--checkpoint-dir", str(folder / "kept")]
    command = [*launcher, "--nproc-per-node", "2", "--max-restarts", "3", *options, *script]
    return subprocess.Popen(command, env=env, cwd=folder, stdout=-1, stderr=subprocess.STDOUT, text=True)


def rank_of(launcher: subprocess.Popen[str], number: int) -> int:
    for process in psutil.Process(launcher.pid).children(recursive=True):
        with contextlib.suppress(psutil.Error):  # some come and go
            if process.environ().get("RANK") == str(number) and SCRIPT.name in " ".join(process.cmdline()):
                return process.pid
    raise AssertionError(f"rank {number} does not run")


def digests(output: str) -> list[str]:
    return re.findall(r"ends with parameters ([0-9a-f]{64})", output)


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_script_without_torchloom_ends_with_the_same_bits_after_a_kill_as_undisturbed(tmp_path: Path) -> None:
    disturbed = tmp_path / "disturbed"
    # Whoever opens a pipe to write into it waits for a reader: rank 0 stands there until it was hit.
    gate = disturbed / "kept" / ".checkpoint_step_30.pt.writing"
    gate.parent.mkdir(parents=True)
    os.mkfifo(gate)
    with (
        start(TORCHRUN, tmp_path / "undisturbed") as peer,
        start(LOOM, disturbed, "--standby", "0", "--checkpoint-dir", str(disturbed / "kept")) as launcher,
    ):
        try:
            end = time.monotonic() + 120
            while not (disturbed / "kept" / "checkpoint_step_20.pt").exists():
                assert time.monotonic() < end
                assert launcher.poll() is None
                time.sleep(0.01)
            victim = rank_of(launcher, 1)
            gate.unlink()
            os.kill(victim, signal.SIGKILL)
            told = launcher.communicate(timeout=200)[0]
            expected = peer.communicate(timeout=200)[0]
        finally:
            launcher.kill()
            peer.terminate()
    assert launcher.returncode == 0, told
    assert peer.returncode == 0, expected
    assert "loom: attempt 2 resumes from" in told
    assert told.count("does not call torchloom.attach(): its steps are counted at optimizer.step()") == 1
    assert len(re.findall(r"resumes after step [2-5]0", told)) == 2, told
    assert len(digests(told)) == len(digests(expected)) == 2
    assert len({*digests(told), *digests(expected)}) == 1
