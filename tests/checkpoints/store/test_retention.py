"""What need not be kept is deleted; never the last good one, never one that is being read, never what is not ours."""

from __future__ import annotations

import os
import tempfile
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.checkpoints.victims import begin, kill, leftovers, state, value_of
from tests.examples import examples
from tests.fork_server import FORKS
from torchloom.checkpoints.api import Checkpoints
from torchloom.checkpoints.store import manifest as manifests
from torchloom.checkpoints.store.checksums import describe
from torchloom.checkpoints.store.locks import reading
from torchloom.checkpoints.store.manifest import Manifest, folder_name
from torchloom.checkpoints.store.retention import Keep, prune
from torchloom.checkpoints.store.search import latest
from torchloom.errors import BadInput

NOW = 1_800_000_000.0
HOUR = 3600.0


def put(folder: Path, step: int, hours: float = 0.0, whole: bool = True) -> Path:
    """A checkpoint that is `hours` old."""
    path = folder / folder_name(step)
    path.mkdir()
    (path / "state.pt").write_bytes(bytes([step % 256]) * 50)
    manifest = Manifest(step=step, files=(describe(path / "state.pt"),), created=NOW - hours * HOUR)
    (path / manifests.NAME).write_bytes(manifests.encode(manifest))
    if not whole:
        (path / "state.pt").write_bytes(b"damaged" * 7 + b".")
    return path


def steps(folder: Path) -> list[int]:
    return sorted(int(path.name[5:]) for path in folder.glob("step-*"))


saved = st.dictionaries(st.integers(0, 60), st.tuples(st.integers(-5, 50), st.booleans()), max_size=8)
maybe = st.none() | st.integers(1, 6)


@examples(150)
@given(saved=saved, last=maybe, hours=st.none() | st.floats(0.5, 40), every=maybe)
def test_a_rule_keeps_what_any_of_its_parts_keeps_and_always_a_good_one(
    saved: dict[int, tuple[int, bool]], last: int | None, hours: float | None, every: int | None
) -> None:
    kept = set()
    for rank, step in enumerate(sorted(saved, reverse=True)):
        age, _ = saved[step]
        among_the_newest = last is not None and rank < last
        young = hours is not None and age < hours
        on_the_mark = every is not None and step % every == 0
        no_rule = last is None and hours is None and every is None
        if among_the_newest or young or on_the_mark or no_rule:
            kept.add(step)
    good = {step for step, (_, whole) in saved.items() if whole}
    if not good:
        kept = set(saved)  # nothing that might still be mended is thrown away
    elif not kept & good:
        kept.add(max(good))
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as name:
        folder = Path(name)
        for step, (age, whole) in saved.items():
            put(folder, step, age, whole)
        tried = prune(folder, Keep(last, hours, every), NOW, dry_run=True)
        assert set(steps(folder)) == set(saved), "a trial deletes nothing"
        pruned = prune(folder, Keep(last, hours, every), NOW)
        assert set(steps(folder)) == kept
        assert pruned.deleted == tried.deleted == [folder_name(step) for step in sorted(set(saved) - kept)]
        assert leftovers(folder) == []


def test_the_last_good_one_stays_when_newer_ones_are_damaged(tmp_path: Path) -> None:
    for step, whole in ((1, True), (2, True), (3, False), (4, False)):
        put(tmp_path, step, whole=whole)
    pruned = prune(tmp_path, Keep(last=2), NOW)
    assert (steps(tmp_path), pruned.spared) == ([2, 3, 4], {"step-2": "it is the last good one"})
    assert latest(tmp_path).step == 2


def test_what_is_trusted_is_trusted_only_as_it_was_written(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    for step in (1, 2):
        checkpoints.save(step, state(step))
        checkpoints.wait()
    file = tmp_path / "step-2" / "state.pt"
    file.write_bytes(file.read_bytes()[:-1] + b"?")
    checkpoints.prune(Keep(last=1))
    assert steps(tmp_path) == [1, 2]
    checkpoints.close()


def test_a_save_deletes_what_its_rule_does_not_keep(tmp_path: Path) -> None:
    with Checkpoints(tmp_path, keep=Keep(last=2, every=4)) as checkpoints:
        for step in range(1, 11):
            checkpoints.save(step, state(step))
    assert steps(tmp_path) == [4, 8, 9, 10]
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        checkpoints.save(11, state(11))
    assert steps(tmp_path) == [11]


def test_a_clock_that_went_back_makes_nothing_old(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        put(tmp_path, step, hours=-1000)
    prune(tmp_path, Keep(hours=1), NOW)
    assert steps(tmp_path) == [1, 2, 3]
    prune(tmp_path, Keep(last=1), NOW)
    assert steps(tmp_path) == [3]


def read(path: Path, begun: Any, done: Any) -> None:
    with reading(path):
        begun.set()
        done.wait(60)


def test_one_that_another_process_reads_is_spared_until_it_has_been_read(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        put(tmp_path, step)
    begun, done = FORKS.Event(), FORKS.Event()
    reader = begin(read, tmp_path / "step-1", begun, done)
    assert begun.wait(60)
    pruned = prune(tmp_path, Keep(last=1), NOW)
    assert (steps(tmp_path), pruned.spared) == ([1, 3], {"step-1": "it is being read"})
    done.set()
    reader.join(60)
    prune(tmp_path, Keep(last=1), NOW)
    assert steps(tmp_path) == [3]


def test_a_reader_that_is_killed_holds_nothing(tmp_path: Path) -> None:
    for step in (1, 2):
        put(tmp_path, step)
    begun, done = FORKS.Event(), FORKS.Event()
    reader = begin(read, tmp_path / "step-1", begun, done)
    assert begun.wait(60)
    kill(reader)
    prune(tmp_path, Keep(last=1), NOW)
    assert steps(tmp_path) == [2]


def test_what_is_not_ours_is_not_touched(tmp_path: Path) -> None:
    for step in (1, 5, 9):
        put(tmp_path, step)
    (tmp_path / "model_3.pt").write_bytes(b"somebody's")
    (tmp_path / "checkpoint-4").mkdir()
    (tmp_path / "step-6").mkdir()
    (tmp_path / "step-6" / "notes.txt").write_text("never finished, or somebody's")
    (tmp_path / "step-7").symlink_to("step-5")
    (tmp_path / "step-8").write_text("a file")
    (tmp_path / ".saving-step-2").mkdir()
    prune(tmp_path, Keep(last=1), NOW)
    names = sorted(path.name for path in tmp_path.iterdir() if path.name != ".pruner")
    assert names == [".saving-step-2", "checkpoint-4", "model_3.pt", "step-6", "step-7", "step-8", "step-9"]


def test_two_that_prune_at_once_leave_a_good_one(tmp_path: Path) -> None:
    for step in range(40):
        put(tmp_path, step, hours=step)
    rules = [Keep(hours=2), Keep(last=1), Keep(every=7), Keep(last=3)]
    threads = [threading.Thread(target=prune, args=(tmp_path, rule, NOW)) for rule in rules]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert latest(tmp_path).rejected == {}
    assert leftovers(tmp_path) == []


@pytest.mark.parametrize(
    "wrong",
    [
        {"last": 0}, {"last": -1}, {"last": True}, {"last": 1.5}, {"last": "3"}, {"every": 0}, {"every": 2.5},
        {"hours": 0}, {"hours": float("nan")}, {"hours": -1.0}, {"hours": "1"},
    ],
)  # fmt: skip
def test_a_rule_that_cannot_be_meant_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(BadInput):
        Keep(**wrong)


# ── what processes that are gone left behind ─────────────────────────────────────────────────────────────────────────


def test_leftovers_are_cleaned_by_the_next_writer_and_what_was_set_aside_is_put_back(tmp_path: Path) -> None:
    put(tmp_path, 3)
    put(tmp_path, 4).rename(tmp_path / ".old-step-4-0123abcd")
    for name in (".saving-step-5-0123abcd", ".deleting-step-1-0123abcd", ".old-step-3-0123abcd"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "state.pt").write_bytes(b"half")
    (tmp_path / ".saving-step-6-0123abcd").write_text("a file")
    (tmp_path / ".saving-step-7-0123abcd").symlink_to(tmp_path / "step-3")
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(9, state(9))
    checkpoints.close()
    assert leftovers(tmp_path) == []
    assert steps(tmp_path) == [3, 4, 9]
    assert {path.name for path in (tmp_path / "step-3").iterdir()} == {"state.pt", manifests.NAME}


def test_what_is_being_written_in_this_process_is_not_taken_for_a_leftover(tmp_path: Path) -> None:
    first = Checkpoints(tmp_path)
    assert first.resume(state(0.0)) == 0
    (tmp_path / ".saving-step-5-0123abcd").mkdir()
    second = Checkpoints(tmp_path)
    second.save(1, state(1.0))
    second.close()
    assert leftovers(tmp_path) == [".saving-step-5-0123abcd"]
    first.close()
    third = Checkpoints(os.path.relpath(tmp_path))
    taken = state(0.0)
    assert third.resume(taken) == 1
    assert value_of(taken) == 1.0
    assert leftovers(tmp_path) == []
    third.close()
