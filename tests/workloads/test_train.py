"""The training script of the rows: the number of its steps, and the same losses after a SIGKILL, to the bit."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from torchloom.errors import BadInput
from torchloom.workloads.train import count_steps, parse_arguments

TRAIN = [sys.executable, "-m", "torchloom.workloads.train"]
SMALL = ("--arch", "small", "--depth", "3", "--scale", "0.1", "--classes", "10", "--sample-seconds", "0")
STEPS = ("--batch", "10", "--end-iter", "6", "--end-epoch", "4", "--start-iter", "2", "--checkpoint-every", "4")
FINISHED = re.compile(r"finished (\d+) steps, (\d+) samples, losses ([0-9a-f]{64})")


def environment(folder: Path, **more: str) -> dict[str, str]:
    own = {name: value for name, value in os.environ.items() if not name.startswith("TORCHLOOM_")}
    return own | {"TORCHLOOM_STATE": str(folder / "state"), "TORCHLOOM_OFF": "1", "OMP_NUM_THREADS": "1"} | more


def finished(output: str) -> tuple[int, int, str]:
    match = FINISHED.search(output)
    assert match, output
    return int(match[1]), int(match[2]), match[3]


def run(folder: Path, *words: str) -> tuple[int, int, str]:
    folder.mkdir(exist_ok=True)
    ended = subprocess.run(
        [*TRAIN, *SMALL, *words], env=environment(folder), cwd=folder, capture_output=True, text=True, timeout=200
    )
    assert ended.returncode == 0, ended.stderr
    return finished(ended.stdout)


@pytest.mark.parametrize(
    ("words", "steps"),
    [
        ((), 100),
        (("--end-iter", "500", "--end-epoch", "3"), 1500),
        (("--end-iter", "500", "--end-epoch", "3", "--start-epoch", "2", "--start-iter", "100"), 900),
    ],
)
def test_the_steps_are_those_of_all_epochs_but_the_first_iterations(words: tuple[str, ...], steps: int) -> None:
    assert count_steps(parse_arguments(words)) == steps


@pytest.mark.parametrize("words", [("--start-iter", "100"), ("--start-epoch", "2"), ("--start-iter", "-1")])
def test_steps_that_cannot_be_are_refused(words: tuple[str, ...]) -> None:
    with pytest.raises(BadInput, match="there are"):
        count_steps(parse_arguments(words))


@pytest.mark.long
def test_the_losses_do_not_depend_on_the_loader_processes(tmp_path: Path) -> None:
    alone = run(tmp_path / "a", *STEPS)
    assert alone[:2] == (22, 220)
    assert run(tmp_path / "b", *STEPS, "--workers", "2") == alone
    assert run(tmp_path / "c", *STEPS, "--seed", "2")[2] != alone[2]


@pytest.mark.long
def test_a_killed_training_ends_with_the_losses_of_an_undisturbed_one(tmp_path: Path) -> None:
    whole = run(tmp_path / "whole", *STEPS)
    folder = tmp_path / "killed"
    folder.mkdir()
    command = [*TRAIN, *SMALL, *STEPS, "--log-every", "1", "--workers", "1", "--sample-seconds", "0.01"]
    with subprocess.Popen(command, env=environment(folder), cwd=folder, stdout=subprocess.PIPE, text=True) as training:
        assert training.stdout
        for line in training.stdout:
            if line.startswith("step 14 "):
                training.kill()
    assert training.returncode == -signal.SIGKILL
    resumed = subprocess.run(
        [*TRAIN, *SMALL, *STEPS], env=environment(folder), cwd=folder, capture_output=True, text=True, timeout=200
    )
    assert "resumes after step" in resumed.stdout, resumed.stderr
    assert finished(resumed.stdout) == whole


@pytest.mark.long
def test_two_ranks_with_unequal_shares_train_under_torchrun_as_under_loom_run(tmp_path: Path) -> None:
    words = ["--batch", "9", "--end-iter", "12", "--workers", "3", "--checkpoint-every", "5"]
    results = []
    for how in ("torchrun", "loom"):
        folder = tmp_path / how
        folder.mkdir()
        launcher = {
            "torchrun": ["torch.distributed.run", "--nproc-per-node", "2", "--standalone"],
            "loom": ["torchloom.cli.main", "run", "--nproc-per-node", "2"],
        }[how]
        command = [sys.executable, "-m", *launcher, "-m", "torchloom.workloads.train", *SMALL, *words]
        env = environment(folder)
        if how == "loom":
            del env["TORCHLOOM_OFF"]
        ended = subprocess.run(command, env=env, cwd=folder, capture_output=True, text=True, timeout=250)
        assert ended.returncode == 0, ended.stderr + ended.stdout
        results.append(finished(ended.stdout))
    assert results[0] == results[1]
    assert results[0][:2] == (12, 108)


SUICIDE = """
import os, signal, sys
from pathlib import Path
from torchloom.threadlet.threadlet import Threadlet
from torchloom.workloads.train import parse_arguments, train

step = Threadlet.step
def hit(self, *words, **more):
    step(self, *words, **more)
    if self.step_number == 8 and os.environ["RANK"] == "1" and not Path("died").exists():
        Path("died").touch()
        os.kill(os.getpid(), signal.SIGKILL)
Threadlet.step = hit
train(parse_arguments())
"""


@pytest.mark.long
def test_two_ranks_resume_to_the_same_losses_after_one_is_killed(tmp_path: Path) -> None:
    words = ["--batch", "9", "--end-iter", "12", "--workers", "3", "--checkpoint-every", "3", *SMALL]
    results = []
    for how in ("whole", "killed"):
        folder = tmp_path / how
        folder.mkdir()
        (folder / "hit.py").write_text(SUICIDE)
        if how == "whole":
            (folder / "died").touch()
        env = environment(folder)
        del env["TORCHLOOM_OFF"]
        command = [
            sys.executable, "-m", "torchloom.cli.main", "run", "--nproc-per-node", "2", "--max-restarts", "2",
            "--checkpoint-dir", "trace/example/checkpoints", "hit.py", *words,
        ]  # fmt: skip
        ended = subprocess.run(command, env=env, cwd=folder, capture_output=True, text=True, timeout=250)
        assert ended.returncode == 0, ended.stderr + ended.stdout
        results.append((finished(ended.stdout), "resumes after step" in ended.stdout))
    assert results == [(results[0][0], False), (results[0][0], True)]
