"""Going back to before a step: the right one is found, what came since is out of the way, and nothing is deleted."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests import damaged_json
from tests.checkpoints.store.test_search import make
from torchloom import Checkpoints, Keep
from torchloom.checkpoints.store.inventory import take_inventory
from torchloom.checkpoints.store.locks import WriterLock
from torchloom.checkpoints.store.retention import prune
from torchloom.checkpoints.store.rollback import NOTE, NothingBefore, roll_back
from torchloom.checkpoints.store.search import candidates, latest
from torchloom.errors import NoValidCheckpoint


def names(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.glob("rolled-back-*/*") if path.name != NOTE)


def damage(folder: Path, step: int) -> None:
    (folder / f"step-{step}" / "state.pt").write_bytes(b"")


def test_the_newest_before_the_step_is_taken_and_what_came_since_is_put_aside(tmp_path: Path) -> None:
    for step in (80, 90, 100, 110):
        make(tmp_path, step)
    done = roll_back(tmp_path, "i1", before=100)
    assert done is not None
    assert done.path == tmp_path / "step-90"
    assert names(tmp_path) == ["rolled-back-1/step-100", "rolled-back-1/step-110"]
    assert latest(tmp_path).step == 90


def test_several_back_passes_over_those_that_are_not_whole(tmp_path: Path) -> None:
    for step in (60, 70, 80, 90, 100):
        make(tmp_path, step)
    damage(tmp_path, 80)
    done = roll_back(tmp_path, "i1", before=95, back=2)
    assert done is not None
    assert done.step == 70
    assert list(done.rejected) == ["step-80"]
    assert latest(tmp_path).step == 70


def test_where_there_are_not_so_many_it_is_the_oldest(tmp_path: Path) -> None:
    for step in (80, 90):
        make(tmp_path, step)
    found = roll_back(tmp_path, "i1", before=100, back=5)
    assert found is not None
    assert found.step == 80


def test_the_same_rollback_asked_for_twice_goes_back_once(tmp_path: Path) -> None:
    for step in (70, 80, 90, 100):
        make(tmp_path, step)
    first = roll_back(tmp_path, "i1", before=100, back=2)
    second = roll_back(tmp_path, "i1", before=100, back=2)
    assert first is not None
    assert second is not None
    assert (first.step, second.step) == (80, 80)
    third = roll_back(tmp_path, "i2", before=100, back=2)
    assert third is not None
    assert third.step == 70
    assert names(tmp_path) == ["rolled-back-1/step-100", "rolled-back-1/step-90", "rolled-back-2/step-80"]


def test_one_that_was_killed_half_way_is_finished(tmp_path: Path) -> None:
    for step in (80, 90, 100):
        make(tmp_path, step)
    roll_back(tmp_path, "i1", before=100, back=2)
    (tmp_path / "rolled-back-1" / "step-90").rename(tmp_path / "step-90")
    found = roll_back(tmp_path, "i1", before=100, back=2)
    assert found is not None
    assert found.step == 80
    assert names(tmp_path) == ["rolled-back-1/step-100", "rolled-back-1/step-90"]


@pytest.mark.parametrize("data", damaged_json.damage(b'{"of":"i1","before":90}'))
def test_a_damaged_note_does_not_hinder_the_next_time(tmp_path: Path, data: bytes) -> None:
    for step in (80, 90, 100):
        make(tmp_path, step)
    roll_back(tmp_path, "i1", before=100)
    (tmp_path / "rolled-back-1" / NOTE).write_bytes(data)
    found = roll_back(tmp_path, "i2", before=90)
    assert found is not None
    assert found.step == 80
    assert names(tmp_path) == ["rolled-back-1/step-100", "rolled-back-2/step-90"]


def test_with_nothing_before_it_training_begins_anew_and_finds_nothing(tmp_path: Path) -> None:
    make(tmp_path, 10)
    done = roll_back(tmp_path, "i1", before=5)
    assert done is None
    assert candidates(tmp_path) == []
    assert names(tmp_path) == ["rolled-back-1/step-10"]


def test_what_was_there_and_is_not_any_more_is_no_reason_to_begin_anew(tmp_path: Path) -> None:
    make(tmp_path, 100)
    with pytest.raises(NothingBefore, match="before step 50"):
        roll_back(tmp_path, "i1", before=50, saved=True)
    make(tmp_path, 40)
    damage(tmp_path, 40)
    with pytest.raises(NoValidCheckpoint, match="step-40"):
        roll_back(tmp_path, "i1", before=50)
    assert names(tmp_path) == []


def test_files_of_others_go_aside_under_their_own_names_and_no_search_finds_them(tmp_path: Path) -> None:
    for step in (90, 100, 110):
        torch.save({"a": step}, tmp_path / f"checkpoint_step_{step}.pt")
    (tmp_path / "resnet50.pt").write_text("not a checkpoint")
    done = roll_back(tmp_path, "i1", before=100, pattern="checkpoint_step_{step}.pt")
    assert done is not None
    assert done.kind == "torch.save"
    assert names(tmp_path) == ["rolled-back-1/checkpoint_step_100.pt", "rolled-back-1/checkpoint_step_110.pt"]
    assert [c.step for c in candidates(tmp_path)] == [90]
    assert (tmp_path / "resnet50.pt").exists()
    assert not (tmp_path / ".writer").exists()


def test_a_folder_of_others_goes_aside_whole_and_looks_like_no_checkpoint_from_above(tmp_path: Path) -> None:
    for step in (90, 100):
        folder = tmp_path / f"checkpoint-{step}"
        folder.mkdir()
        (folder / "config.json").write_text("{}")
        (folder / "model.safetensors").write_text("weights")
    roll_back(tmp_path, "i1", before=100)
    (tmp_path / "rolled-back-1" / "config.json").write_text("{}")  # as someone who looks into it may leave there
    assert [c.step for c in candidates(tmp_path)] == [90]
    assert (tmp_path / "rolled-back-1" / "checkpoint-100" / "model.safetensors").read_text() == "weights"


def test_retention_neither_counts_nor_deletes_what_was_put_aside(tmp_path: Path) -> None:
    for step in (80, 90, 100, 110):
        make(tmp_path, step)
    roll_back(tmp_path, "i1", before=100)
    pruned = prune(tmp_path, Keep(last=2), 0.0)
    assert pruned.deleted == []
    assert names(tmp_path) == ["rolled-back-1/step-100", "rolled-back-1/step-110"]


def test_the_script_goes_on_from_there_and_saves_the_same_step_again(tmp_path: Path) -> None:
    state = {"x": torch.zeros(1)}
    with Checkpoints(tmp_path) as checkpoints:
        for step in (90, 100):
            state["x"].fill_(step)
            checkpoints.save(step, state)
            checkpoints.wait()
    roll_back(tmp_path, "i1", before=100)
    with Checkpoints(tmp_path) as checkpoints:
        assert checkpoints.resume(state) == 90
        checkpoints.save(100, state)
    assert latest(tmp_path).step == 100
    assert names(tmp_path) == ["rolled-back-1/step-100"]


def test_nothing_is_moved_while_another_job_writes_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import subprocess
    import sys

    for step in (90, 100):
        make(tmp_path, step)
    code = "import sys; from pathlib import Path; from torchloom.checkpoints.store.locks import WriterLock\n"
    code += "lock = WriterLock(Path(sys.argv[1]), 'theirs'); print('held', flush=True); sys.stdin.read()"
    monkeypatch.setattr(WriterLock.__init__, "__defaults__", ("", 0.0))
    with subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout
        assert other.stdout.readline() == "held\n"
        from torchloom.errors import AlreadyUp

        with pytest.raises(AlreadyUp, match="theirs"):
            roll_back(tmp_path, "i1", before=100, job="mine")
        assert names(tmp_path) == []
        other.communicate("")


def test_they_are_listed_as_rolled_back_and_a_resume_does_not_take_them(tmp_path: Path) -> None:
    for step in (90, 100):
        make(tmp_path, step)
    roll_back(tmp_path, "i1", before=100)
    found = take_inventory(tmp_path, 0.0, verify=True)
    assert [(e.name, e.status) for e in found.entries] == [
        ("rolled-back-1/step-100", "rolled back"), ("step-90", "valid"),
    ]  # fmt: skip
    assert [entry.name for entry in found.finished] == ["step-90"]
    assert found.resume is not None
    assert found.resume.name == "step-90"


def test_two_threads_that_are_told_the_same_at_once_do_it_once(tmp_path: Path) -> None:
    from concurrent.futures import ThreadPoolExecutor

    for step in range(10, 400, 10):
        torch.save({}, tmp_path / f"step_{step}.pt")
    with ThreadPoolExecutor(8) as many:
        done = list(many.map(lambda _: roll_back(tmp_path, "i1", before=100, back=2), range(8)))
    assert {one.step for one in done if one} == {80}
    assert len(names(tmp_path)) == 31
