"""A process killed at any system call of a save leaves the old checkpoint or the new one; the next writer cleans up."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Collection, Iterator
from pathlib import Path

import pytest
import torch

from tests.checkpoints.victims import CALLS, counted, leftovers, run, save_three, save_twice, value_of, why_untraceable
from torchloom.checkpoints import torch_files
from torchloom.checkpoints.pending_save import PendingSave, SingleFileSave
from torchloom.checkpoints.staging import StagingBuffers
from torchloom.checkpoints.store import commit
from torchloom.checkpoints.store.locks import WriterLock
from torchloom.checkpoints.store.search import latest

UNTRACEABLE = why_untraceable()
traced = pytest.mark.skipif(bool(UNTRACEABLE), reason=UNTRACEABLE)
SWAPPING = ("rename", "renameat2", "fsync", "unlinkat", "rmdir")
CANNOT_SWAP = ("renameat2:error=EINVAL",)


def found(folder: Path) -> tuple[int, float]:
    """The newest that is whole: its step, and which state it holds."""
    newest = latest(folder)
    assert newest.rejected == {}
    return newest.step, value_of(torch_files.read(newest.path / torch_files.STATE)["state"])


def clean_as_the_next_writer(folder: Path) -> None:
    lock = WriterLock(folder)
    assert lock.first
    commit.clean(folder)
    lock.close()


def sweep(tmp_path: Path, step: int, keep: int | None, calls: Collection[str], *rules: str) -> Iterator[Path]:
    """The folders left by saves that were killed before each of these system calls."""
    assert run(save_twice, tmp_path / "whole", step, keep, tmp_path / "log", *rules) == 0
    counts = {call: count for call, count in counted(tmp_path / "log").items() if call in calls}
    for call, count in counts.items():
        numbers: Collection[int] = range(1, count + 1)
        if call == "write":  # of the many in the middle of one hidden file, some
            numbers = {1, 2, count // 3, 2 * count // 3, count - 1, count}
        for number in numbers:
            folder = tmp_path / f"{call}-{number}"
            kill = f"{call}:signal=SIGKILL:when={number}"
            others = [rule for rule in rules if not rule.startswith(f"{call}:")]
            code = run(save_twice, folder, step, keep, tmp_path / "log", *others, kill)
            assert code == -signal.SIGKILL, folder.name
            yield folder
            shutil.rmtree(folder)


@pytest.mark.long
@traced
def test_killed_anywhere_in_a_save_and_a_deletion_there_is_the_last_one_or_the_new_one(tmp_path: Path) -> None:
    seen, left = set(), set()
    for folder in sweep(tmp_path, 2, 1, CALLS):
        before = found(folder)
        clean_as_the_next_writer(folder)
        assert found(folder) == before, folder.name
        assert leftovers(folder) == [], folder.name
        seen.add(before)
        left.add(tuple(sorted(path.name for path in folder.glob("step-*"))))
    assert seen == {(1, 1.0), (2, 2.0)}
    assert left == {("step-1",), ("step-1", "step-2"), ("step-2",)}


@traced
def test_killed_anywhere_while_a_step_is_saved_anew_there_is_the_one_or_the_other(tmp_path: Path) -> None:
    seen = set()
    for folder in sweep(tmp_path, 1, None, SWAPPING):
        before = found(folder)
        clean_as_the_next_writer(folder)
        assert found(folder) == before, folder.name
        assert leftovers(folder) == [], folder.name
        seen.add(before)
    assert seen == {(1, 1.0), (1, 2.0)}


@traced
def test_where_names_cannot_be_swapped_the_next_writer_puts_back_what_a_kill_left_aside(tmp_path: Path) -> None:
    aside = 0
    for folder in sweep(tmp_path, 1, None, SWAPPING, *CANNOT_SWAP):
        aside += not (folder / "step-1").exists()
        clean_as_the_next_writer(folder)
        assert found(folder) in {(1, 1.0), (1, 2.0)}, folder.name
        assert leftovers(folder) == [], folder.name
    assert aside == 1, "between its two renames there is neither"


# ── a disk that fails ────────────────────────────────────────────────────────────────────────────────────────────────


@traced
@pytest.mark.parametrize(
    ("rule", "why"),
    [
        ("mkdir:error=ENOSPC:when=1", "No space left on device"),
        ("openat:error=EMFILE:when=1", "Too many open files"),
        ("write:error=ENOSPC:when=1", "No space left on device"),
        ("write:error=ENOSPC:when=3", "No space left on device"),
        ("write:error=EIO:when=5", "Input/output error"),
        ("fsync:error=EIO:when=1", "Input/output error"),
        ("fsync:error=EIO:when=2", "Input/output error"),
        ("fsync:error=ENOSPC:when=3", "No space left on device"),
        ("rename:error=EIO:when=1", "Input/output error"),
    ],
)
def test_a_disk_that_fails_once_costs_one_checkpoint_and_says_why(tmp_path: Path, rule: str, why: str) -> None:
    assert run(save_three, tmp_path / "runs", 2, tmp_path / "log", rule) == 0
    (error, left, newest), after = json.loads((tmp_path / "log.json").read_text())
    assert why in error
    assert (left, newest) == ([], 1.0), "the last good one stays, nothing half-written does"
    assert after == ["", [], 3.0]


@traced
@pytest.mark.parametrize("failing", [2, 3])
def test_where_names_cannot_be_swapped_a_failing_rename_leaves_the_last_one_in_place(
    tmp_path: Path, failing: int
) -> None:
    rules = (*CANNOT_SWAP, f"rename:error=EIO:when={failing}")
    assert run(save_three, tmp_path / "runs", 1, tmp_path / "log", *rules) == 0
    (error, left, newest), after = json.loads((tmp_path / "log.json").read_text())
    assert "Input/output error" in error
    assert (left, newest) == ([], 1.0)
    assert after == ["", [], 3.0]
    assert value_of(torch_files.read(tmp_path / "runs" / "step-1" / torch_files.STATE)["state"]) == 1.0


def test_a_save_whose_draft_cannot_be_removed_says_why_it_failed(tmp_path: Path) -> None:
    folder = tmp_path / "runs"
    folder.mkdir()

    class Doomed(PendingSave):
        def grow(self, size: int) -> None:
            if folder.is_dir():
                folder.rename(tmp_path / "moved")
                folder.touch()
            raise OSError(errno.ENOSPC, "No space left on device")

    save = SingleFileSave(Doomed(1, folder / "step-1"), {"state": {"value": torch.zeros(1)}}, StagingBuffers())
    with pytest.raises(OSError, match="No space left on device"):
        save.write()


FULL = """
import sys, torch
from pathlib import Path
from tests.checkpoints.victims import leftovers, state, value_of
from torchloom.checkpoints.api import Checkpoints
folder = Path(sys.argv[1])
checkpoints = Checkpoints(folder / "runs")
checkpoints.save(1, state(1.0))
checkpoints.wait()
saving = checkpoints.save(2, {"value": torch.zeros(3_000_000)})
saving.wait()
assert "No space left on device" in saving.error, saving
assert leftovers(folder / "runs") == []
assert value_of(checkpoints.load().state) == 1.0
saving = checkpoints.save(3, state(3.0))
saving.wait()
assert not saving.error, saving
assert value_of(checkpoints.load().state) == 3.0
print("continued")
"""


def test_a_full_disk_costs_one_checkpoint_and_what_fits_is_saved_again(tmp_path: Path) -> None:
    mounted = ["unshare", *(["-m"] if os.geteuid() == 0 else ["-rm"]), "sh", "-c"]
    mount = 'mount -t tmpfs -o size=1m none "$0"'
    tried = subprocess.run([*mounted, mount, tmp_path], capture_output=True, text=True)
    if tried.returncode:
        pytest.skip(f"no small filesystem can be mounted here: {tried.stderr.strip()}")
    command = [*mounted, mount + ' && exec "$1" -c "$2" "$0"', str(tmp_path), sys.executable, FULL]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[3])
    assert done.stdout == "continued\n", done.stderr
