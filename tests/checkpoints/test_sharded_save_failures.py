"""One rank fails: the save fails on all ranks, none hangs, nothing incomplete appears, and training continues."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

from tests.checkpoints.ranks import Job, job
from tests.checkpoints.test_sharded_save import visible
from tests.checkpoints.training import Kind, Plan, Training
from torchloom.checkpoints.store.locks import WriterLock
from torchloom.checkpoints.store.search import latest
from torchloom.errors import AlreadyUp, BadInput, BadState


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("room", [0, 2000])
def test_a_rank_that_cannot_write_fails_the_save_and_not_the_training(tmp_path: Path, rank: int, room: int) -> None:
    """It may have room for a mark that says so, or for nothing at all."""
    with job(2, Plan(tmp_path)) as ranks:
        ranks.all(Training.resume)
        ranks.all(Training.train, 1)
        ranks.all(Training.limit, rank, room)
        errors = ranks.all(Training.save)
        assert "File too large" in errors[rank]
        assert errors[1 - rank]
        if rank == 1:
            assert "rank 1" in errors[0]
        assert visible(tmp_path) == []
        ranks.all(Training.unlimit)
        ranks.all(Training.train, 1)
        assert ranks.all(Training.save) == ["", ""]
    assert visible(tmp_path) == ["step-2"]
    assert latest(tmp_path).step == 2


@pytest.mark.skipif(shutil.which("strace") is None, reason="needs strace to let a disk fail")
def test_a_disk_that_fails_one_rank_at_the_last_moment_fails_the_save(tmp_path: Path) -> None:
    with job(2, Plan(tmp_path)) as ranks:
        ranks.all(Training.train, 1)
        with failing(ranks[1].pid, "fsync:error=EIO"):
            errors = ranks.all(Training.save)
        assert "Input/output error" in errors[1]
        assert "rank 1: " in errors[0]
        assert visible(tmp_path) == []
        ranks.all(Training.train, 1)
        assert ranks.all(Training.save) == ["", ""]


class failing:
    """While it lasts, this system call of a process fails."""

    def __init__(self, pid: int, how: str) -> None:
        call = how.partition(":")[0]
        command = [
            "strace",
            "-f",
            "-qq",
            "-p",
            str(pid),
            "-e",
            f"trace={call}",
            "-e",
            f"inject={how}",
            "-o",
            "/dev/null",
        ]
        self._pid = pid
        self._strace = subprocess.Popen(command, stderr=subprocess.DEVNULL)

    def __enter__(self) -> None:
        status = Path(f"/proc/{self._pid}/task")
        while any("TracerPid:\t0" in (task / "status").read_text() for task in status.iterdir()):
            assert self._strace.poll() is None, "strace may not trace here"

    def __exit__(self, *_: object) -> None:
        self._strace.send_signal(signal.SIGINT)
        self._strace.wait(10)


@pytest.fixture
def gate(tmp_path: Path) -> Path:
    path = tmp_path / "gate"
    os.mkfifo(path)
    return path


def open_gate(gate: Path) -> None:
    os.close(os.open(gate, os.O_WRONLY))  # waits until somebody stands there


def test_a_rank_that_is_killed_while_it_writes_is_named_and_leaves_no_checkpoint(tmp_path: Path, gate: Path) -> None:
    plan = Plan(tmp_path / "kept", patience=1.0, gates={1: gate})
    with job(2, plan) as ranks:
        ranks.all(Training.train, 1)
        assert ranks.all(Training.begin_save) == [True, True]
        ranks[1].kill()
        ranks[0].begin(Training.finish_save)
        assert "rank 1 wrote nothing for 1 s" in ranks[0].end()
        assert visible(plan.folder) == []
        ranks.kill()
    again(Plan(plan.folder))


def test_a_first_rank_that_is_killed_while_it_writes_leaves_no_checkpoint(tmp_path: Path, gate: Path) -> None:
    plan = Plan(tmp_path / "kept", patience=1.0, gates={0: gate})
    with job(2, plan) as ranks:
        ranks.all(Training.train, 1)
        ranks.all(Training.begin_save)
        ranks[0].kill()
        ranks[1].begin(Training.finish_save)
        assert "the first rank did not complete it" in ranks[1].end()
        ranks.kill()
    assert [name[:8] for name in visible(plan.folder)] == [".saving-"]
    again(Plan(plan.folder))


def again(plan: Plan) -> None:
    """The job is restarted: nothing of the failed save is left, and the next one works."""
    with job(2, plan) as ranks:
        assert ranks.all(Training.resume) == [0, 0]
        assert visible(plan.folder) == []
        ranks.all(Training.train, 1)
        assert ranks.all(Training.save) == ["", ""]
    assert visible(plan.folder) == ["step-1"]


def test_a_save_that_a_rank_never_comes_to_fails_and_does_not_raise(tmp_path: Path) -> None:
    with job(2, Plan(tmp_path)) as ranks:
        ranks.all(Training.train, 1)
        assert ranks.all(Training.save) == ["", ""]
        ranks[1].kill()
        ranks[0].begin(Training.save, 2)
        why = ranks[0].end()
        assert isinstance(why, str)
        assert why
        ranks.kill()
    assert visible(tmp_path) == ["step-1"]


def test_while_one_rank_still_writes_all_leave_the_next_save_out(tmp_path: Path, gate: Path) -> None:
    plan = Plan(tmp_path / "kept", busy="skip", gates={1: gate})
    with job(2, plan) as ranks:
        ranks.all(Training.train, 1)
        assert ranks.all(Training.begin_save) == [True, True]
        ranks.all(Training.train, 1)
        assert ranks.all(Training.begin_save) == [False, False]
        open_gate(gate)
        assert ranks.all(Training.finish_save) == ["", ""]
        ranks.all(Training.train, 1)
        assert ranks.all(Training.save) == ["", ""]
    assert visible(plan.folder) == ["step-1", "step-3"]


class Unknown:
    """Of a class that no checkpoint may hold."""


class Alive:
    """With a state of its own that cannot be saved."""

    def state_dict(self) -> dict[str, Unknown]:
        return {"it": Unknown()}

    def load_state_dict(self, state: object) -> None:
        pass


@pytest.mark.parametrize("value", [Unknown(), Alive(), {"deep": [1, Unknown()]}])
def test_a_state_that_cannot_be_saved_is_refused_on_all_ranks(tmp_path: Path, value: object) -> None:
    with job(2, Plan(tmp_path)) as ranks:
        ranks.all(Training.train, 1)
        for rank in (0, 1, None):
            ranks.all(Training.add, "bad", {"good": 1})
            ranks.all(Training.add, "bad", value, rank)
            refusals = ranks.outcomes(Training.save)
            assert {type(refusal) for refusal in refusals} == {BadInput}
            assert any("bad" in str(refusal) and "Unknown cannot be saved" in str(refusal) for refusal in refusals)
            if rank is not None:
                assert f"rank {rank}: " in str(refusals[1 - rank])
        ranks.all(Training.add, "bad", 7)
        assert ranks.all(Training.save) == ["", ""]
    assert visible(tmp_path) == ["step-1"]


def test_ranks_whose_states_have_different_names_are_refused(tmp_path: Path) -> None:
    with job(2, Plan(tmp_path)) as ranks:
        ranks.all(Training.train, 1)
        ranks.all(Training.add, "extra", 1, 1)
        refusals = ranks.outcomes(Training.save)
    assert {type(refusal) for refusal in refusals} == {BadInput}
    assert all("extra" in str(refusal) and "rank 1" in str(refusal) for refusal in refusals)
    assert visible(tmp_path) == []


def test_a_state_that_is_none_on_one_rank_keeps_nobody_waiting(tmp_path: Path) -> None:
    with job(2, Plan(tmp_path)) as ranks:
        ranks.all(Training.train, 1)
        ranks.all(Training.add, "", 1, 1)
        assert {type(refusal) for refusal in ranks.outcomes(Training.save)} == {BadInput}
        assert {type(refusal) for refusal in ranks.outcomes(Training.resume)} <= {BadInput, BadState}


@pytest.mark.long
def test_a_folder_that_another_job_writes_into_is_refused_on_all_ranks(tmp_path: Path) -> None:
    lock = WriterLock(tmp_path)
    try:
        with job(2, Plan(tmp_path)) as ranks:
            outcomes = ranks.outcomes(Training.save, 1)
            assert {type(outcome) for outcome in outcomes} == {AlreadyUp}
            assert all(f"pid {os.getpid()}" in str(outcome) for outcome in outcomes)
    finally:
        lock.close()


# ── resuming ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def kept(plan: Plan) -> None:
    with job(2, plan) as ranks:
        ranks.all(Training.train, 3)
        ranks.all(Training.save)


def refused(ranks: Job) -> list[str]:
    """Nothing is loaded, on any rank; why."""
    before = ranks.all(Training.print)
    outcomes = ranks.outcomes(Training.resume)
    assert {type(outcome) for outcome in outcomes} == {BadState}
    assert ranks.all(Training.print) == before
    assert not any(key.startswith("optimizer") for rank in before for key in rank)  # fresh it was, fresh it is
    return [str(outcome) for outcome in outcomes]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_model_that_does_not_fit_on_one_rank_changes_nothing_on_any(tmp_path: Path, rank: int) -> None:
    kept(Plan(tmp_path))
    with job(2, Plan(tmp_path)) as ranks:
        ranks.all(Training.widen, rank)
        assert all(f"rank {rank}" in why and "Size mismatch" in why for why in refused(ranks))


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_an_object_that_refuses_on_one_rank_changes_nothing_on_any(tmp_path: Path, rank: int, kind: Kind) -> None:
    kept(Plan(tmp_path, kind))
    with job(2, Plan(tmp_path, kind)) as ranks:
        ranks.all(Training.refuse, rank)
        whys = refused(ranks)
        assert "this sampler is of another data set" in whys[rank]
        assert f"rank {rank}: " in whys[1 - rank]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_part_that_one_rank_alone_has_changes_nothing_on_any(tmp_path: Path, rank: int) -> None:
    kept(Plan(tmp_path))
    with job(2, Plan(tmp_path)) as ranks:
        ranks.all(Training.add, "extra", 1, rank)
        assert all("it has no extra" in why for why in refused(ranks))


@pytest.mark.parametrize("rank", [0, 1])
def test_an_optimizer_of_other_parameters_on_one_rank_changes_nothing_on_any(tmp_path: Path, rank: int) -> None:
    kept(Plan(tmp_path))
    with job(2, Plan(tmp_path)) as ranks:
        ranks.all(Training.lose_optimizer, rank)
        before = ranks.all(Training.print)
        outcomes = ranks.outcomes(Training.resume)
        assert all(isinstance(outcome, (BadState, BadInput)) for outcome in outcomes)
        assert ranks.all(Training.print) == before
