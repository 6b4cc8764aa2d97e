"""One job writes into a folder. A second one learns which; a killed process holds no lock, nor do its children."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoints.victims import begin, kill, run, state
from tests.fork_server import FORKS
from torchloom.checkpoints.api import Checkpoints
from torchloom.checkpoints.store.locks import WriterLock
from torchloom.errors import AlreadyUp


def hold(folder: Path, begun: Any, done: Any) -> None:
    """A job that has saved, and keeps running."""
    checkpoints = Checkpoints(folder)
    checkpoints.save(1, state(1.0))
    checkpoints.wait()
    begun.set()
    done.wait(60)


def hold_and_fork(folder: Path, begun: Any, done: Any) -> None:
    """The same; it ends with 5 if a forked child of it was not allowed to save."""
    checkpoints = Checkpoints(folder)
    checkpoints.save(1, state(1.0))
    checkpoints.wait()
    child = os.fork()
    if child == 0:
        try:
            checkpoints.save(3, state(3.0))
        except AlreadyUp:
            os._exit(5)
        os._exit(0)
    begun.set()
    done.wait(60)
    os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))


def hold_with_a_loader(folder: Path, child: Any, begun: Any, done: Any) -> None:
    """The same, with a forked worker that outlives it."""
    checkpoints = Checkpoints(folder)
    checkpoints.save(1, state(1.0))
    checkpoints.wait()
    loader = os.fork()
    if loader == 0:
        time.sleep(120)
        os._exit(0)
    child.value = loader
    begun.set()
    done.wait(60)


def is_taken(folder: Path) -> None:
    """Exit code 5 if it is."""
    try:
        WriterLock(folder, patience=0.0)
    except AlreadyUp:
        os._exit(5)


@pytest.mark.long
def test_the_second_job_hears_which_process_is_there(tmp_path: Path) -> None:
    begun, done = FORKS.Event(), FORKS.Event()
    first = begin(hold_and_fork, tmp_path, begun, done)
    assert begun.wait(60)
    second = Checkpoints(tmp_path)
    with pytest.raises(AlreadyUp, match=rf"pid {first.pid} on "):
        second.save(2, state(2.0))
    assert not (tmp_path / "step-2").exists()
    assert second.load().step == 1, "reading needs no lock"
    done.set()
    first.join(60)
    assert first.exitcode == 5, "its forked child is a second job as well"
    second.save(2, state(2.0))
    second.close()
    assert (tmp_path / "step-2").exists()


def test_once_the_first_is_killed_the_second_may_write(tmp_path: Path) -> None:
    begun, done = FORKS.Event(), FORKS.Event()
    first = begin(hold, tmp_path, begun, done)
    assert begun.wait(60)
    assert run(is_taken, tmp_path) == 5
    kill(first)
    with Checkpoints(tmp_path) as second:
        assert second.resume(state(0.0)) == 1
        second.save(2, state(2.0))
    assert (tmp_path / "step-2").exists()


def test_a_loader_that_outlives_the_killed_job_does_not_keep_the_folder(tmp_path: Path) -> None:
    begun, done, child = FORKS.Event(), FORKS.Event(), FORKS.Value("i", 0)
    first = begin(hold_with_a_loader, tmp_path, child, begun, done)
    assert begun.wait(60)
    kill(first)
    assert child.value > 1
    try:
        os.kill(child.value, 0)
        with Checkpoints(tmp_path) as second:
            assert second.resume(state(0.0)) == 1
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child.value, signal.SIGKILL)


def test_a_forked_child_can_neither_release_nor_use_the_lock_of_its_parent(tmp_path: Path) -> None:
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, state(1.0))
        checkpoints.wait()
        child = os.fork()
        if child == 0:
            try:
                checkpoints.close()
                WriterLock(tmp_path, patience=0.0)
            except AlreadyUp:
                os._exit(5)
            os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 5
        assert run(is_taken, tmp_path) == 5
    assert run(is_taken, tmp_path) == 0


def test_it_is_held_until_the_last_in_the_process_has_closed(tmp_path: Path) -> None:
    first, second = WriterLock(tmp_path), WriterLock(tmp_path)
    assert (first.first, second.first) == (True, False)
    first.close()
    first.close()
    assert run(is_taken, tmp_path) == 5
    second.close()
    assert run(is_taken, tmp_path) == 0


def test_looking_into_the_folder_does_not_release_it(tmp_path: Path) -> None:
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        for step in (1, 2):
            checkpoints.save(step, state(step))
        checkpoints.wait()
        checkpoints.load()
        checkpoints.prune()
        with contextlib.suppress(Exception):
            Checkpoints(tmp_path).latest()
        assert run(is_taken, tmp_path) == 5
