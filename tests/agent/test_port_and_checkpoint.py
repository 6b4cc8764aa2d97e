"""What an agent finds for the ranks to go on from and to meet at, and what it says where there is nothing."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace

from tests.checkpoints.store.test_search import make
from torchloom.agent.environment import RankPaths, rank_environment
from torchloom.agent.port_and_checkpoint import explain_port_taken, free_port, prepare
from torchloom.protocol.job_spec import Task
from torchloom.protocol.node import AttemptStatus, Launch, Place, Prepare, Rollback
from torchloom.protocol.phrase import Phrase


def order(folder: Path, rollback: Rollback | None = None, attempt: int = 2, **task: str) -> Prepare:
    given = {"checkpoint_dir": str(folder)} | task
    wanted = Task(argv=("train.py",), **given)  # type: ignore[arg-type]
    return Prepare(term=1, job="mnist", attempt=attempt, task=wanted, submitted=5.0, rollback=rollback)


def error_of(status: AttemptStatus) -> str:
    assert isinstance(status.trouble, Phrase)
    return str(status.trouble.args["error"])


def test_without_a_rollback_it_is_the_newest(tmp_path: Path) -> None:
    make(tmp_path, 90)
    make(tmp_path, 100)
    prepared = prepare(order(tmp_path), "127.0.0.1")
    assert (prepared.resume, prepared.resume_step) == (str(tmp_path / "step-100"), 100)
    assert prepared.port


def test_a_rollback_told_twice_and_again_to_the_next_attempt_is_one(tmp_path: Path) -> None:
    for step in (70, 80, 90, 100):
        make(tmp_path, step)
    back = Rollback(before=100, back=2, incident="i7")
    for attempt in (2, 2, 3):
        assert prepare(order(tmp_path, back, attempt), "127.0.0.1").resume_step == 80
    assert prepare(order(tmp_path), "127.0.0.1").resume_step == 80
    assert prepare(order(tmp_path, Rollback(before=100, back=2, incident="i8"), 4), "127.0.0.1").resume_step == 70


def test_with_no_checkpoint_yet_a_rollback_is_a_beginning(tmp_path: Path) -> None:
    prepared = prepare(order(tmp_path / "later", Rollback(before=5)), "127.0.0.1")
    assert (prepared.trouble, prepared.resume, prepared.resume_step) == ("", "", None)
    torch.save({}, tmp_path / "step_10.pt")
    prepared = prepare(order(tmp_path, Rollback(before=5)), "127.0.0.1")
    assert (prepared.trouble, prepared.resume_step) == ("", None)
    assert prepare(order(tmp_path), "127.0.0.1").resume_step is None


def test_where_a_checkpoint_must_be_and_is_not_it_says_so_and_changes_nothing(tmp_path: Path) -> None:
    make(tmp_path, 100)
    prepared = prepare(order(tmp_path, Rollback(before=50, saved=True)), "127.0.0.1")
    assert "a checkpoint before step 50 was saved" in error_of(prepared)
    assert prepared.trouble_code == 8
    assert (tmp_path / "step-100").exists()
    gone = prepare(order(tmp_path / "gone", Rollback(before=50, saved=True)), "127.0.0.1")
    assert "is gone" in error_of(gone)


def test_a_job_that_named_no_folder_goes_back_where_its_ranks_save(tmp_path: Path) -> None:
    make(tmp_path, 90)
    make(tmp_path, 100)
    told = Rollback(before=100, folder=str(tmp_path), incident="i1")
    assert prepare(order(tmp_path, told, checkpoint_dir=""), "127.0.0.1").resume_step == 90
    unknown = prepare(order(tmp_path, Rollback(before=100), checkpoint_dir=""), "127.0.0.1")
    assert isinstance(unknown.trouble, Phrase)
    assert "--checkpoint-dir" in str(unknown.trouble.args["hint"])


def test_ranks_are_told_which_batches_to_leave_out() -> None:
    place = Place(rank=0, local=0, node="n1", incarnation="1" * 24)
    launch = Launch(
        term=1, job="mnist", attempt=2, task=Task(argv=("a.py",)), places=(place,), host="n1", port=1, skip=(101, 103)
    )  # fmt: skip
    assert rank_environment({}, launch, place, RankPaths(""))["TORCHLOOM_SKIP"] == "101-103"


@pytest.fixture
def taken() -> Iterator[int]:
    """A port at which somebody listens."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        yield listening.getsockname()[1]


def first(port: int) -> Prepare:
    return Prepare(term=1, job="mnist", attempt=7, ordinal=1, task=Task(argv=("train.py",), port=port))


def test_a_first_attempt_meets_at_the_port_that_was_named_if_it_is_free(taken: int) -> None:
    free = free_port("127.0.0.1")
    assert prepare(first(free), "127.0.0.1").port == free
    refused = prepare(first(taken), "127.0.0.1")
    assert isinstance(refused.trouble, Phrase)
    assert (refused.port, refused.retry, refused.trouble.code) == (0, True, "port_taken")
    assert str(os.getpid()) in str(refused.trouble.args["user"])


def test_a_later_attempt_takes_a_free_port(taken: int) -> None:
    later = prepare(replace(first(taken), ordinal=2), "127.0.0.1")
    assert (later.trouble, later.retry) == ("", False)
    assert later.port not in {0, taken}


def test_a_port_that_was_in_use_a_moment_ago_is_free() -> None:
    with socket.socket() as listening:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        port = listening.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)) as client:
            served, _ = listening.accept()
            served.close()  # the side that closes first keeps the port for a while
            client.recv(1)
    assert explain_port_taken(port) is None
