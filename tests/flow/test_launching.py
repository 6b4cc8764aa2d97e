"""`loom run`: a script under torchLoom from beginning to end, with real processes and real kills."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.flow.records import BY_SIGKILL, rank_failed
from torchloom.protocol.phrase import phrase
from torchloom.views.wording.phrases import render

LOOM = [sys.executable, "-P", "-m", "torchloom.cli.main"]
PATIENCE = 120.0
"""Seconds after which something that has not come is taken not to come. Machines may have much else to do."""
SCRIPT = """
import json, os, sys, time
from pathlib import Path
import torchloom

folder = Path(sys.argv[1])
steps = int(sys.argv[2])
rank = int(os.environ["RANK"])
first = 0
resume = os.environ["TORCHLOOM_RESUME_FROM"]
if resume:
    first = int(Path(resume).stem.rpartition("_")[2])
attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
(folder / f"pid-{rank}").write_text(str(os.getpid()))
print(f"rank {rank} of {os.environ['WORLD_SIZE']} from {first} attempt {attempt}", flush=True)
with torchloom.attach() as loom:
    for step in range(first + 1, steps + 1):
        time.sleep(0.02)
        loom.step(step=step, loss=1.0 / step)
        if (folder / f"fail-{rank}").exists():
            (folder / f"fail-{rank}").unlink()
            raise ValueError("as it was told")
        if loom.stopping:
            break
print(f"rank {rank} ends at {step}", flush=True)
"""


class Launched:
    def __init__(self, folder: Path, *words: str, steps: int = 100_000, script: str = SCRIPT) -> None:
        self.folder = folder
        (folder / "train.py").write_text(script)
        self.output = folder / "output.txt"
        env = {k: v for k, v in os.environ.items() if not k.startswith("TORCHLOOM_")}
        env["TORCHLOOM_STATE"] = str(folder / "state")
        command = [*LOOM, "run", "--nproc-per-node", "2", *words, str(folder / "train.py"), str(folder), str(steps)]
        with self.output.open("wb") as output:
            self.process = subprocess.Popen(command, env=env, stdout=output, stderr=output, cwd=folder)

    def text(self) -> str:
        return self.output.read_text(errors="replace")

    def until(self, what: Callable[[], bool], seconds: float = PATIENCE) -> None:
        end = time.monotonic() + seconds
        while not what():
            assert time.monotonic() < end, self.text()
            assert self.process.poll() is None or what(), self.text()
            time.sleep(0.02)

    def until_trained(self, attempt: int) -> None:
        self.until(lambda: len(re.findall(rf"rank \d of 2 from \d+ attempt {attempt}\b", self.text())) == 2)

    def pid(self, rank: int) -> int:
        return int((self.folder / f"pid-{rank}").read_text())

    def end(self, seconds: float = PATIENCE) -> int:
        return self.process.wait(seconds)

    def family(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Callable[..., Launched]]:
    made: list[Launched] = []

    def start(*words: str, **more: Any) -> Launched:
        made.append(Launched(tmp_path, *words, **more))
        return made[-1]

    yield start
    for one in made:
        if one.process.poll() is None:
            one.process.kill()
            one.process.wait()


def gone(processes: list[psutil.Process]) -> bool:
    _, alive = psutil.wait_procs(processes, timeout=60)
    return not alive


def test_a_script_runs_to_its_end_and_nothing_is_left(launch: Callable[..., Launched]) -> None:
    run = launch(steps=20)
    family: list[psutil.Process] = []
    run.until(lambda: bool(family.extend(run.family()) or family))
    assert run.end() == 0, run.text()
    assert sorted(re.findall(r"\[(\d)\] rank \d ends at 20", run.text())) == ["0", "1"]
    assert "train is done" in run.text()
    assert gone(family)


def test_what_ranks_of_a_short_life_print_is_shown_and_the_state_folder_stays_private(
    launch: Callable[..., Launched],
) -> None:
    run = launch("--max-restarts", "1", "--standby", "0", script="import torhc_that_is_not_there")
    assert run.end() == 1
    told = run.text()
    shown = re.findall(r"^\[[01]\] ModuleNotFoundError: No module named 'torhc_that_is_not_there'$", told, re.MULTILINE)
    assert len(shown) >= 2, told  # of each attempt one at least
    first = told.index("loom: attempt 2 begins")
    assert "[0] ModuleNotFoundError" in told[:first] or "[1] ModuleNotFoundError" in told[:first]
    assert (run.folder / "state").stat().st_mode & 0o777 == 0o700


@pytest.mark.promise(6)
def test_a_killed_rank_is_started_again_with_its_peers_from_the_newest_valid_checkpoint(
    launch: Callable[..., Launched], tmp_path: Path
) -> None:
    import torch

    kept = tmp_path / "kept"
    kept.mkdir()
    run = launch("--checkpoint-dir", str(kept), "--max-restarts", "2")
    run.until_trained(0)
    peer = run.pid(0)
    for step in (7, 9):
        torch.save({"step": step}, kept / f"checkpoint_step_{step}.pt")
    (kept / "checkpoint_step_9.pt").write_bytes(b"torn")
    os.kill(run.pid(1), signal.SIGKILL)
    run.until_trained(1)
    assert len(re.findall(r"from 7 attempt 1", run.text())) == 2
    assert not psutil.pid_exists(peer)
    run.until(lambda: f"loom: {rank_failed(1, BY_SIGKILL)}" in run.text())
    (tmp_path / "fail-0").touch()
    run.until_trained(2)
    os.kill(run.pid(0), signal.SIGKILL)
    assert run.end() == 137, run.text()
    assert re.findall(r"loom: attempt (\d) resumes from", run.text()) == ["2", "3"]
    last = phrase("rank_of_run_failed", rank=0, how=BY_SIGKILL, error="")
    used_up = render(phrase("restarts_used_up", reason=last, allowed=2))
    assert f"is failed: {used_up}" in run.text()


def test_an_exception_that_repeats_ends_it_with_its_code(launch: Callable[..., Launched], tmp_path: Path) -> None:
    run = launch("--max-restarts", "0")
    run.until_trained(0)
    (tmp_path / "fail-1").touch()
    assert run.end() == 1
    assert "ValueError: as it was told" in run.text()


@pytest.mark.wording
def test_output_that_cannot_be_kept_ends_it_with_the_reason(launch: Callable[..., Launched]) -> None:
    run = launch("--log-dir", "/proc/nope")
    assert run.end() == 1, run.text()
    assert "No such file or directory" in run.text()


def test_ctrl_c_ends_all_ranks_in_order(launch: Callable[..., Launched]) -> None:
    run = launch()
    run.until_trained(0)
    family = run.family()
    run.process.send_signal(signal.SIGINT)
    assert run.end() == 130, run.text()
    assert gone(family)


def test_nothing_outlives_a_killed_launcher(launch: Callable[..., Launched]) -> None:
    run = launch()
    run.until_trained(0)
    family = run.family()
    run.process.kill()
    run.process.wait()
    assert gone(family)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["missing.py"], "there is no script missing.py"),
        ([], "nothing to run"),
        (["--rdzv-backend", "c10d", "x.py"], "has no option --rdzv-backend"),
        (["--nproc-per-node", "none", __file__], "--nproc-per-node 'none'"),
        (["--checkpoint-pattern", "x.pt", __file__], "has no {step}"),
        (["--env", "A", __file__], "--env NAME=VALUE"),
    ],
)
def test_what_cannot_be_meant_is_told_before_anything_starts(words: list[str], said: str, tmp_path: Path) -> None:
    env = os.environ | {"TORCHLOOM_STATE": str(tmp_path / "s")}
    command = [*LOOM, "run", *words]
    ended = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE)
    assert ended.returncode == 2, ended.stderr
    assert said in ended.stderr
