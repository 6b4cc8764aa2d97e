"""save() acts when it is time, waits or leaves out while one is being written, and a script that ends has saved."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoints.victims import leftovers, run, state, value_of
from torchloom.checkpoints import threadlet_bridge
from torchloom.checkpoints.api import Checkpoints
from torchloom.checkpoints.store.locks import PRUNER, WriterLock
from torchloom.errors import AlreadyUp, BadInput, BadState
from torchloom.protocol.rank import Resumed, Saved, SaveFailed, Value


def saved(checkpoints: Checkpoints, steps: Any) -> list[int]:
    """At which of these steps save() acted."""
    acted = []
    for step in steps:
        if checkpoints.save(step, {"step": step}) is not None:
            acted.append(step)
    checkpoints.wait()
    return acted


def steps(folder: Path) -> list[int]:
    return sorted(int(path.name[5:]) for path in folder.glob("step-*"))


@contextlib.contextmanager
def held(folder: Path) -> Iterator[None]:
    """A save with `keep` is not over before this is: it waits for its turn to prune."""
    folder.mkdir(exist_ok=True)
    file = os.open(folder / PRUNER, os.O_RDWR | os.O_CREAT)
    fcntl.flock(file, fcntl.LOCK_EX)
    try:
        yield
    finally:
        os.close(file)


# ── when ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_without_every_each_call_saves(tmp_path: Path) -> None:
    with Checkpoints(tmp_path) as checkpoints:
        assert saved(checkpoints, [1, 2, 7]) == [1, 2, 7]


def test_every_saves_at_its_multiples(tmp_path: Path) -> None:
    with Checkpoints(tmp_path, every=5) as checkpoints:
        assert saved(checkpoints, range(1, 17)) == [5, 10, 15]


def test_step_numbers_that_skip_a_multiple_save_after_it(tmp_path: Path) -> None:
    with Checkpoints(tmp_path, every=10) as checkpoints:
        assert saved(checkpoints, range(3, 60, 7)) == [10, 24, 31, 45, 52]


def test_every_may_be_changed_while_training(tmp_path: Path) -> None:
    with Checkpoints(tmp_path, every=10) as checkpoints:
        assert saved(checkpoints, range(1, 13)) == [10]
        checkpoints.every = 4
        assert saved(checkpoints, range(13, 22)) == [16, 20]
        checkpoints.every = 100
        assert saved(checkpoints, range(22, 99)) == []
        checkpoints.every = None
        assert saved(checkpoints, [99, 100]) == [99, 100]


def test_now_saves_whatever_the_step(tmp_path: Path) -> None:
    with Checkpoints(tmp_path, every=100) as checkpoints:
        assert checkpoints.save(3, state(1.0)) is None
        assert checkpoints.save(3, state(1.0), now=True) is not None
        checkpoints.wait()
        assert checkpoints.save(3, state(2.0), now=True) is not None
        checkpoints.wait()
        assert value_of(checkpoints.load().state) == 2.0


def test_a_step_that_is_saved_is_not_saved_again_unasked(tmp_path: Path) -> None:
    with Checkpoints(tmp_path) as checkpoints:
        assert checkpoints.save(3, state(1.0)) is not None
        assert checkpoints.save(3, state(2.0)) is None
        checkpoints.wait()
        assert value_of(checkpoints.load().state) == 1.0


def test_a_resumed_run_does_not_save_again_what_it_resumed_from(tmp_path: Path) -> None:
    with Checkpoints(tmp_path, every=5) as checkpoints:
        saved(checkpoints, range(1, 8))
    with Checkpoints(tmp_path, every=5) as checkpoints:
        assert checkpoints.resume({"step": 0}) == 5
        assert saved(checkpoints, range(6, 12)) == [10]


def test_a_wish_is_fulfilled_at_the_next_save(tmp_path: Path) -> None:
    with Checkpoints(tmp_path, every=100) as checkpoints:
        assert saved(checkpoints, [1, 2]) == []
        assert "next save()" in checkpoints.wanted(2)
        assert saved(checkpoints, [3, 4]) == [3]


def test_a_wish_is_fulfilled_at_once_where_the_objects_are_known(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 2)
    with Checkpoints(tmp_path, every=100) as checkpoints:
        assert checkpoints.resume({"model": model}) == 0
        assert checkpoints.wanted(7) == str(tmp_path / "step-7")
        assert checkpoints.save(7, {"model": model}) is None, "it was saved already, on request"
        checkpoints.wait()
        assert steps(tmp_path) == [7]


# ── while one is being written ───────────────────────────────────────────────────────────────────────────────────────


def test_busy_skip_leaves_out_what_comes_while_one_is_being_written(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=9, busy="skip")
    with held(tmp_path):
        first = checkpoints.save(1, state(1.0))
        assert first is not None
        assert checkpoints.save(2, state(2.0)) is None
        assert not first.done
    assert first.wait(60)
    assert checkpoints.save(3, state(3.0)) is not None
    checkpoints.close()
    assert steps(tmp_path) == [1, 3]


def test_busy_wait_lets_the_last_one_be_finished_first(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=9)
    second = threading.Thread(target=lambda: checkpoints.save(2, state(2.0)))
    with held(tmp_path):
        first = checkpoints.save(1, state(1.0))
        assert first is not None
        second.start()
        second.join(0.2)
        assert second.is_alive()
        assert not (tmp_path / "step-2").exists()
    second.join(60)
    checkpoints.close()
    assert steps(tmp_path) == [1, 2]
    assert first.done


def test_a_wish_that_comes_while_one_is_being_written_is_not_forgotten(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, every=100, keep=9, busy="skip")
    with held(tmp_path):
        first = checkpoints.save(1, state(1.0), now=True)
        assert first is not None
        checkpoints.wanted(2)
        assert checkpoints.save(2, state(2.0)) is None
    assert first.wait(60)
    assert checkpoints.save(3, state(3.0)) is not None
    checkpoints.close()


def test_a_wish_at_once_is_refused_while_one_is_being_written(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 2)
    checkpoints = Checkpoints(tmp_path, keep=9, busy="skip")
    checkpoints.resume({"model": model})
    with held(tmp_path):
        checkpoints.save(1, {"model": model})
        with pytest.raises(BadState, match="still being written"):
            checkpoints.wanted(2)
    checkpoints.close()


def test_a_save_tells_how_far_it_is(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=1)
    with held(tmp_path):
        saving = checkpoints.save(1, {"large": torch.zeros(1_000_000)})
        assert saving is not None
        assert saving.total > 4_000_000
        assert saving.progress < 1.0
        assert not saving.wait(0.0)
    assert saving.wait(60)
    assert (saving.progress, saving.error) == (1.0, "")
    assert saving.written >= saving.total
    checkpoints.close()


@pytest.mark.parametrize("wrong", [{"every": 0}, {"every": True}, {"every": 1.5}, {"keep": 0}, {"busy": "never"}])
def test_what_cannot_be_meant_is_refused(tmp_path: Path, wrong: dict[str, Any]) -> None:
    with pytest.raises(BadInput):
        Checkpoints(tmp_path, **wrong)


# ── the end of the script ────────────────────────────────────────────────────────────────────────────────────────────

SCRIPT = """
import atexit, json, os, sys, torch
from torchloom.checkpoints.api import Checkpoints
torch.set_num_threads(1)
codes = {}
for name, how in json.loads(sys.argv[2]).items():
    child = os.fork()
    if child == 0:
        break
    codes[name] = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
else:
    print(json.dumps(codes))
    sys.exit()
checkpoints = Checkpoints(os.path.join(sys.argv[1], name), keep=2)
state = {"large": torch.full((1_000_000,), 1.0)}
exec(how)
"""
"""Each ending is that of an interpreter of its own, which has imported torch before."""
ENDINGS = {
    "falls off its end": ("checkpoints.save(1, state)", 0),
    "raises": ("checkpoints.save(1, state); raise ValueError('diverged')", 1),
    "exits": ("checkpoints.save(1, state); sys.exit(3)", 3),
    "saves while it exits": ("atexit.register(lambda: checkpoints.save(1, state))", 0),
    "saves twice": ("checkpoints.save(0, state); checkpoints.save(1, state)", 0),
    "is interrupted": ("checkpoints.save(1, state); os.kill(os.getpid(), 2)", -signal.SIGINT),
}


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, int]]:
    """A folder for each of the endings, and their exit codes."""
    folder = tmp_path_factory.mktemp("ended")
    endings = json.dumps({name: how for name, (how, _) in ENDINGS.items()})
    command = [sys.executable, "-c", SCRIPT, str(folder), endings]
    return folder, json.loads(subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL).stdout)


@pytest.mark.parametrize("name", ENDINGS)
def test_a_script_that_ends_after_a_save_has_saved(ended: tuple[Path, dict[str, int]], name: str) -> None:
    folder, codes = ended
    assert codes[name] == ENDINGS[name][1]
    loaded = Checkpoints(folder / name).load()
    assert (loaded.step, dict(loaded.rejected)) == (1, {})
    assert torch.equal(loaded.state["large"], torch.full((1_000_000,), 1.0))
    assert leftovers(folder / name) == []


def take(folder: Path) -> None:
    """Exit code 5 if another process writes there."""
    try:
        WriterLock(folder, patience=0.0)
    except AlreadyUp:
        os._exit(5)


def fork_in_flight(folder: Path, how: str) -> None:
    """Forks while a save is being written, as a loader does; exit code 0 if the child ended well."""
    with Checkpoints(folder, keep=1) as checkpoints, held(folder):
        checkpoints.save(1, {"large": torch.zeros(2_000_000), **state(1.0)})
        child = os.fork()
        if child == 0 and how == "leaves the block":
            sys.exit(0)
        if child == 0:
            os._exit(checkpoints.wait() if how == "waits" else 0)
        end = time.monotonic() + 60
        while time.monotonic() < end and not (ended := os.waitpid(child, os.WNOHANG))[0]:
            time.sleep(0.01)
        if not ended[0]:
            os.kill(child, signal.SIGKILL)
            ended = os.waitpid(child, 0)
    sys.exit(os.waitstatus_to_exitcode(ended[1]))


@pytest.mark.parametrize("how", ["ends", "waits", "leaves the block"])
def test_a_child_forked_while_one_is_written_ends_and_harms_nothing(tmp_path: Path, how: str) -> None:
    folder = tmp_path / "runs"
    assert run(fork_in_flight, folder, how) == 0
    loaded = Checkpoints(folder).load()
    assert value_of(loaded.state) == 1.0
    assert leftovers(folder) == []


def test_closed_it_can_be_opened_again(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, state(1.0))
    checkpoints.close()
    checkpoints.close()
    assert run(take, tmp_path) == 0
    checkpoints.save(2, state(2.0))
    assert run(take, tmp_path) == 5
    checkpoints.close()
    assert steps(tmp_path) == [1, 2]


# ── what is reported ───────────────────────────────────────────────────────────────────────────────────────────────


class Listener:
    """A threadlet that keeps the reports."""

    job, rank, incarnation = "mnist", 0, "1" * 24

    def __init__(self) -> None:
        self.news: list[Saved | SaveFailed | Resumed] = []

    def keep(self, kept: threadlet_bridge.CheckpointPort) -> None:
        pass

    def tell(self, news: Saved | SaveFailed | Resumed) -> None:
        self.news.append(news)

    def values(self) -> dict[str, Value]:
        return {}

    def phase(self, name: str) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        pass


@pytest.fixture
def listener() -> Iterator[Listener]:
    listener = Listener()
    threadlet_bridge.register_threadlet(listener)
    yield listener
    threadlet_bridge.unregister_threadlet(listener)


@pytest.mark.parametrize(
    ("in_the_way", "error"),
    [
        (lambda folder: folder.write_text(""), "OSError ENOTDIR"),
        (lambda folder: folder.symlink_to(folder), "OSError ELOOP"),
    ],
)
def test_saves_that_fail_alike_are_told_with_the_same_word(
    tmp_path: Path, listener: Listener, in_the_way: Callable[[Path], object], error: str
) -> None:
    in_the_way(tmp_path / "runs")
    with Checkpoints(tmp_path / "runs" / "a") as checkpoints:
        saved(checkpoints, [1, 2])
    failed = [news for news in listener.news if isinstance(news, SaveFailed)]
    assert [(news.step, news.error) for news in failed] == [(1, error), (2, error)]
