"""Fifty saves hold no more than one: the same buffers, no files left open, no threads left behind."""

from __future__ import annotations

import contextlib
import gc
import threading
from collections import Counter
from pathlib import Path

import psutil
import torch

from torchloom.checkpoints.api import THREAD, Checkpoints
from torchloom.checkpoints.staging import StagingBuffers

SIZE = 1_000_000


def open_files() -> Counter[str]:
    """What this process has open, and how often. What earlier tests left may be closed at any time."""
    found: Counter[str] = Counter()
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the one by which the folder is read
            found[str(entry.readlink())] += 1
    return found


def writers() -> int:
    return sum(thread.name == THREAD for thread in threading.enumerate())


def test_fifty_saves_leave_no_files_open_no_threads_and_no_memory(tmp_path: Path) -> None:
    state = {"model": torch.nn.Linear(100, 100), "large": torch.zeros(SIZE)}
    checkpoints = Checkpoints(tmp_path, keep=2)

    def save(step: int) -> None:
        checkpoints.save(step, state)
        assert checkpoints.wait(60)

    for step in range(5):
        save(step)
    gc.collect()
    files, memory = open_files(), psutil.Process().memory_info().rss
    for step in range(5, 55):
        save(step)
    gc.collect()
    assert not open_files() - files
    assert writers() <= 1, "the last one may be on its way out"
    grown = psutil.Process().memory_info().rss - memory
    assert grown < 4 * SIZE * 4, "less than four copies of the state, after fifty"
    checkpoints.close()
    assert sorted(path.name for path in tmp_path.glob("step-*")) == ["step-53", "step-54"]


def test_saves_that_fail_leak_nothing_either(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    checkpoints = Checkpoints(tmp_path / "file" / "runs")
    files = open_files()
    for step in range(20):
        saving = checkpoints.save(step, {"large": torch.zeros(1000)})
        assert saving is not None
        assert saving.error
    assert not open_files() - files


def test_buffers_are_used_again_as_long_as_the_state_keeps_its_shape() -> None:
    copier = StagingBuffers()
    seen = set()
    for step in range(50):
        copied = copier.copy({"small": torch.full((10,), step), "large": torch.full((SIZE,), step)}).tree
        assert (int(copied["small"][3]), int(copied["large"][-1])) == (step, step)
        seen.add((copied["small"].data_ptr(), copied["large"].data_ptr()))
        copier.release()
    assert len(seen) == 1


def test_buffers_that_are_no_longer_needed_are_let_go() -> None:
    copier = StagingBuffers()
    copier.copy({"large": torch.zeros(SIZE)})
    copier.release()
    copier.copy({"small": torch.zeros(10)})
    copier.release()
    assert sum(buffer.size for buffers in copier._free.values() for buffer in buffers) == 40


def test_a_copy_that_was_refused_gives_its_buffers_back() -> None:
    copier = StagingBuffers()
    first = copier.copy({"a": torch.zeros(SIZE)}).tree["a"].data_ptr()
    copier.release()
    for _ in range(3):
        try:
            copier.copy({"a": torch.zeros(SIZE), "b": print})
        except ValueError:
            continue
        raise AssertionError("a function cannot be saved")
    assert copier.copy({"a": torch.zeros(SIZE)}).tree["a"].data_ptr() == first
