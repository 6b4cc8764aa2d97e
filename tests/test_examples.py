"""The examples run as they stand, and torchLoom does not change a bit of what they compute."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from torchloom.bus.nats_server import EmbeddedServer

EXAMPLES = Path(__file__).parent.parent / "examples"
TRAIN = EXAMPLES / "train_integrated.py"
SHORT = ("--job", "bits", "--replica-id", "hi", "--samples", "1280", "--epochs", "2", "--log-interval", "5")


def environment(state: Path, **more: str) -> dict[str, str]:
    # One thread: the order of additions, and so the last bit, must depend on nothing but the program.
    return os.environ | {"TORCHLOOM_STATE": str(state), "OMP_NUM_THREADS": "1"} | more


def run(script: Path, *options: str, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(script), *options]
    return subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=100)


@pytest.mark.parametrize(("script", "options"), [("bare_loop.py", ()), ("train_integrated.py", ("--dry-run",))])
def test_an_example_ends_well_without_a_control_plane(script: str, options: tuple[str, ...], tmp_path: Path) -> None:
    ended = run(EXAMPLES / script, *options, env=environment(tmp_path))
    assert ended.returncode == 0
    assert "Traceback" not in ended.stderr
    assert ended.stderr.count("no control plane answers") <= 1


@pytest.mark.long
def test_the_classifier_learns_with_loaders_of_its_own(tmp_path: Path) -> None:
    ended = run(TRAIN, "--samples", "3200", "--loaders", "2", env=environment(tmp_path, TORCHLOOM_OFF="1"))
    accuracies = [float(text) for text in re.findall(r"accuracy ([0-9.]+)%", ended.stdout)]
    assert len(accuracies) == 3
    assert accuracies[-1] > max(80, accuracies[0])


@pytest.mark.long
@pytest.mark.parametrize("every", ["7", "20"], ids=["in mid-epoch", "at the end of an epoch"])
def test_a_killed_training_continues_to_the_same_bits_with_other_loaders(every: str, tmp_path: Path) -> None:
    env = environment(tmp_path, TORCHLOOM_OFF="1")
    options = (*SHORT, "--checkpoints", str(tmp_path / "checkpoints"), "--every", every)
    parameters = {how: tmp_path / how / "parameters.pt" for how in ("whole", "resumed")}
    for path in parameters.values():
        path.parent.mkdir()
    whole = run(TRAIN, *SHORT, "--save", str(parameters["whole"]), env=env)
    with subprocess.Popen([sys.executable, str(TRAIN), *options], env=env, stdout=-1, text=True) as training:
        assert training.stdout
        for line in training.stdout:
            if line.startswith("epoch 2  step   10"):
                training.kill()
    resumed = run(TRAIN, *options, "--loaders", "1", "--save", str(parameters["resumed"]), env=env)
    assert (whole.returncode, resumed.returncode) == (0, 0), resumed.stderr
    assert "epoch 1  step    0" not in resumed.stdout, "it has not begun again"
    assert parameters["resumed"].read_bytes() == parameters["whole"].read_bytes()


@pytest.mark.long
def test_training_is_the_same_to_the_bit_with_torchloom_without_it_and_with_its_server_killed_halfway(
    server: EmbeddedServer, tmp_path: Path
) -> None:
    saved = {how: tmp_path / how / "parameters.pt" for how in ("absent", "attached", "killed")}
    for path in saved.values():
        path.parent.mkdir()
    state = server.folder.path

    absent = run(TRAIN, *SHORT, "--save", str(saved["absent"]), env=environment(state, TORCHLOOM_OFF="1"))
    assert absent.returncode == 0, absent.stderr
    attached = run(TRAIN, *SHORT, "--save", str(saved["attached"]), env=environment(state))
    assert attached.returncode == 0, attached.stderr
    assert attached.stderr == ""

    command = [sys.executable, str(TRAIN), *SHORT, "--save", str(saved["killed"])]
    with subprocess.Popen(command, env=environment(state), stdout=-1, stderr=-1, text=True) as training:
        assert training.stdout
        assert training.stderr
        for line in training.stdout:
            if line.startswith("epoch 1  step     5"):
                assert server.process
                server.process.kill()
        told = training.stderr.read()
        assert training.wait(60) == 0
    assert told.count("\n") == 1  # one warning, and nothing else
    assert "is lost; training continues" in told

    contents = {how: path.read_bytes() for how, path in saved.items()}
    assert contents["attached"] == contents["absent"]
    assert contents["killed"] == contents["absent"]
