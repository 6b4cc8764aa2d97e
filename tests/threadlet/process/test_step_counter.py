"""Steps of a script that never attaches are counted at its optimizer, in the rank's own process and nowhere else."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim.optimizer import Optimizer

from tests.threadlet.played import RANK, PlayedWeaver
from torchloom.agent.supervisor.fork import with_startup
from torchloom.protocol.rank import Goodbye, Hello, Knobs, Saved
from torchloom.settings import Settings
from torchloom.threadlet.process import step_counter
from torchloom.threadlet.process.step_counter import Counter
from torchloom.weaver.main import rank_minter


class Tally:
    """Where a counter puts its steps."""

    def __init__(self) -> None:
        self.counter = Counter(lambda: self)
        self._steps = 0

    @property
    def steps(self) -> int:
        self.counter.settle()
        return self._steps

    def step(self) -> None:
        self._steps += 1

    def _count_earlier(self, steps: int) -> None:
        self._steps += steps


@pytest.fixture
def tally() -> Iterator[Tally]:
    """Counts the optimizer steps of this process."""
    tally = Tally()
    handle = step_counter.hook(sys.modules[Optimizer.__module__], tally.counter)
    yield tally
    handle.remove()


def made(kind: Any = torch.optim.SGD, **more: Any) -> tuple[torch.nn.Module, Any]:
    model = torch.nn.Linear(2, 1)
    return model, kind(model.parameters(), lr=0.01, **more)


def learn(model: torch.nn.Module) -> torch.Tensor:
    loss = model(torch.ones(4, 2)).square().mean()
    loss.backward()
    return loss


# ── what is one step ──


def test_batches_that_are_accumulated_make_one_step(tally: Tally) -> None:
    model, optimizer = made()
    for batch in range(12):
        learn(model)
        if batch % 4 == 3:
            optimizer.step()
    assert tally.steps == 3


def test_of_two_optimizers_the_first_counts(tally: Tally) -> None:
    (generator, first), (critic, second) = made(), made(torch.optim.Adam)
    for _ in range(5):
        learn(generator)
        first.step()
        for _ in range(3):
            learn(critic)
            second.step()
    assert tally.steps == 5


def test_a_closure_that_is_called_often_makes_one_step(tally: Tally) -> None:
    model, optimizer = made(torch.optim.LBFGS, max_iter=4)
    calls = []

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        calls.append(1)
        return learn(model)

    for _ in range(3):
        optimizer.step(closure)
    assert len(calls) > 3
    assert tally.steps == 3


def test_another_optimizer_counts_once_the_first_is_gone(tally: Tally) -> None:
    model, optimizer = made()
    learn(model)
    optimizer.step()
    optimizer = torch.optim.Adam(model.parameters())
    optimizer.step()
    optimizer.step()
    assert tally.steps == 3


def test_another_optimizer_counts_once_the_first_has_long_stood_still(tally: Tally) -> None:
    (model, first), (_, second) = made(), made()
    first.step()
    for _ in range(step_counter.STILL + 10):
        second.step()
    assert tally.steps == 1 + 11
    learn(model)


def test_a_step_that_is_compiled_is_left_alone(tally: Tally) -> None:
    model, optimizer = made()
    step = torch.compile(optimizer.step, backend="eager")
    before = model.weight.clone()
    for _ in range(3):
        learn(model)
        step()
    assert not torch.equal(before, model.weight)
    assert tally.steps == 0


def test_what_goes_wrong_in_counting_ends_it_and_not_the_training() -> None:
    def fail() -> Tally:
        raise OSError("no descriptor is left")

    counter = Counter(fail)
    handle = step_counter.hook(sys.modules[Optimizer.__module__], counter)
    try:
        model, optimizer = made()
        learn(model)
        optimizer.step()
        counter.settle()
        optimizer.step()
    finally:
        handle.remove()
    assert counter.over


def test_training_does_not_wait_while_it_joins_and_no_step_is_lost() -> None:
    may = threading.Event()
    tally = Tally()

    def join() -> Tally:
        may.wait(60)
        return tally

    counter = Counter(join)
    optimizer = made()[1]
    for _ in range(5):
        counter.stepped(optimizer)
    may.set()
    counter.settle()
    counter.stepped(optimizer)
    assert tally.steps == 6


# ── a rank ──

TRAIN = """
import os, sys, time, torch
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
def train(steps):
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.ones(4, 2)).square().mean().backward()
        optimizer.step()
"""
WAIT = "\nprint('trained', flush=True)\nsys.stdin.readline()\n"
SETTLE = "from torchloom.threadlet.process import step_counter\nstep_counter._counter.settle()\n"


def environment(settings: Settings, **more: str) -> dict[str, str]:
    """As `loom run` starts a rank."""
    mint = rank_minter(settings)
    assert mint
    creds = Path(settings.state) / "rank.creds"
    creds.write_text(mint(RANK))
    ours = {name: value for name, value in os.environ.items() if not name.startswith("TORCHLOOM_")}
    rank = {"RANK": "0", "WORLD_SIZE": "1", "TORCHLOOM_LAUNCHER": "loom", "TORCHLOOM_JOB": "job"}
    rank |= {
        "TORCHLOOM_CREDS": str(creds),
        "TORCHLOOM_REPLICA": "hi",
        "TORCHLOOM_STATE": settings.state,
        "TORCHLOOM_GOODBYE_SECONDS": "60",
    }
    return with_startup(ours | rank | more)


def run(script: str, env: dict[str, str], folder: Path) -> subprocess.Popen[str]:
    (folder / "train.py").write_text(script)
    command = [sys.executable, "train.py"]
    return subprocess.Popen(command, cwd=folder, env=env, stdin=-1, stdout=-1, stderr=-1, text=True)


async def trained(process: subprocess.Popen[str]) -> None:
    """Importing torch takes its time."""
    assert process.stdout
    assert await asyncio.to_thread(process.stdout.readline) == "trained\n"


async def end(process: subprocess.Popen[str]) -> str:
    """Let it run to its end; returns what it printed."""
    out, err = await asyncio.to_thread(process.communicate, "\n", 100)
    assert (process.returncode, err) == (0, ""), err
    return out


@pytest.mark.long
async def test_a_rank_that_does_not_attach_tells_its_steps_and_nothing_else(
    settings: Settings, weaver: PlayedWeaver, tmp_path: Path
) -> None:
    weaver.welcomes = True
    process = run(TRAIN + "train(7)" + WAIT, environment(settings), tmp_path)
    await trained(process)
    hello = await weaver.report(Hello)
    assert hello.counted
    assert (await weaver.beat(lambda beat: beat.step == 7)).loss is None
    await end(process)
    assert [type(letter) for letter in await weaver.letters()] == [Hello, Goodbye]


@pytest.mark.long
async def test_counting_begins_at_the_step_that_is_resumed_from(
    settings: Settings, weaver: PlayedWeaver, tmp_path: Path
) -> None:
    weaver.welcomes = True
    process = run(TRAIN + "train(2)" + WAIT, environment(settings, TORCHLOOM_RESUME_STEP="100"), tmp_path)
    await trained(process)
    assert await weaver.beat(lambda beat: beat.step == 102)
    await end(process)


@pytest.mark.long
async def test_a_script_that_attaches_is_never_counted(
    settings: Settings, weaver: PlayedWeaver, tmp_path: Path
) -> None:
    weaver.welcomes = True
    script = TRAIN + "import torchloom\nloom = torchloom.attach()\ntrain(5)\nloom.step()\nloom.close()\ntrain(5)"
    await end(run(script, environment(settings), tmp_path))
    hellos = [report for report in await weaver.reports() if isinstance(report, Hello)]
    assert [hello.counted for hello in hellos] == [False]
    await weaver.beat(lambda beat: beat.step == 1)
    assert max(beat.step for beat in weaver.beats) == 1


@pytest.mark.long
async def test_a_script_that_attaches_late_is_counted_no_longer(
    settings: Settings, weaver: PlayedWeaver, tmp_path: Path
) -> None:
    weaver.welcomes = True
    script = TRAIN + "train(5)" + WAIT + "import torchloom\n"
    script += "loom = torchloom.attach(devices=['GPU-7'])\nloom.clip()\n"
    process = run(
        script + "for _ in range(3): train(1), loom.step(loss=1.0)\ntime.sleep(2)", environment(settings), tmp_path
    )
    await trained(process)
    first = await weaver.report(Hello)
    assert await weaver.beat(lambda beat: beat.step == 5)
    await end(process)
    later = await weaver.report(Hello, 1)
    assert (first.counted, later.counted) == (True, False)
    assert first.incarnation == later.incarnation
    assert later.devices == ("GPU-7",)
    assert {knob.name for knob in (await weaver.report(Knobs)).knobs} >= {"clip", "log_level"}
    await weaver.beat(lambda beat: (beat.step, beat.loss) == (3, 1.0))


LOADING = """
class Training(torch.utils.data.Dataset):
    def __len__(self): return 4
    def __getitem__(self, i):
        train(10)  # in a child: not a step of the rank
        return i
if __name__ == "__main__":
    for context in ("fork", "fork", "spawn"):  # before the first step of the rank, and after it
        loader = torch.utils.data.DataLoader(Training(), num_workers=1, multiprocessing_context=context)
        print([int(batch) for batch in loader])
        train(1)
"""


@pytest.mark.long
async def test_what_loader_processes_compute_is_not_counted(
    settings: Settings, weaver: PlayedWeaver, tmp_path: Path
) -> None:
    weaver.welcomes = True
    assert await end(run(TRAIN + LOADING, environment(settings), tmp_path)) == "[0, 1, 2, 3]\n" * 3
    assert len([report for report in await weaver.reports() if isinstance(report, Hello)]) == 1
    assert (await weaver.report(Goodbye)).step == 3


@pytest.mark.long
async def test_checkpoints_of_a_script_that_does_not_attach_are_told(
    settings: Settings, weaver: PlayedWeaver, tmp_path: Path
) -> None:
    weaver.welcomes = True
    script = TRAIN + (
        "import torchloom\n"
        "checkpoints = torchloom.Checkpoints('kept', every=5)\n"
        "state = {'model': model, 'optimizer': optimizer}\n"
        "step = checkpoints.resume(state)\n"
        "print(step)\n"
        "train(1)\n" + SETTLE + "for step in range(step + 1, step + 6): train(1), checkpoints.save(step, state)\n"
        "checkpoints.wait()\n"
    )
    assert await end(run(script, environment(settings), tmp_path)) == "0\n"
    assert (await weaver.report(Saved)).step == 5
    assert await end(run(script, environment(settings), tmp_path)) == "5\n"
    assert not [letter for letter in await weaver.letters() if isinstance(letter, Knobs)]


@pytest.mark.long
async def test_a_rank_that_is_switched_off_is_not_counted(
    settings: Settings, weaver: PlayedWeaver, tmp_path: Path
) -> None:
    await end(run(TRAIN + "train(5)", environment(settings, TORCHLOOM_OFF="1"), tmp_path))
    assert await weaver.reports() == []
