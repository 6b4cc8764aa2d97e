"""Which file holds what a rank printed: of the run that is meant, not of one before it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.damaged_json import damage
from torchloom.agent.attempt import LAUNCH
from torchloom.agent.log_files import find, launches, log_folder
from torchloom.errors import TorchLoomError
from torchloom.protocol.codec import encode
from torchloom.protocol.job_spec import Task
from torchloom.protocol.node import Launch, Place
from torchloom.protocol.views import QueryLines


def launch(folder: Path, attempt: int, submitted: float) -> Launch:
    """As an agent keeps it once it was told to."""
    place = Place(rank=0, local=0, node="n1", incarnation="0" * 24)
    one = Launch(
        term=1, job="mnist", attempt=attempt, task=Task(argv=("train.py",)), places=(place,), host="127.0.0.1", port=1,
        submitted=submitted,
    )  # fmt: skip
    (folder / "mnist" / f"attempt-{attempt}").mkdir(parents=True)
    (folder / "mnist" / f"attempt-{attempt}" / LAUNCH).write_bytes(encode(one))
    return one


def test_what_a_run_before_printed_is_not_taken_for_what_this_one_prints(tmp_path: Path) -> None:
    old = launch(tmp_path, 1, submitted=100.0)
    look = QueryLines(job="mnist", submitted=200.0)
    with pytest.raises(TorchLoomError, match="not started yet"):
        find(tmp_path, look, "n1")
    new = launch(tmp_path, 2, submitted=200.0)
    assert find(tmp_path, look, "n1") == log_folder(tmp_path / "mnist", new) / "rank-0.out"
    assert find(tmp_path, QueryLines(job="mnist"), "n1").parent == log_folder(tmp_path / "mnist", new)
    assert find(tmp_path, QueryLines(job="mnist", submitted=100.0), "n1").parent == log_folder(tmp_path / "mnist", old)


def test_a_damaged_file_is_passed_over_and_the_other_attempts_found(tmp_path: Path) -> None:
    whole = launch(tmp_path, 1, submitted=100.0)
    for number, data in enumerate(damage(encode(whole)), 2):
        launch(tmp_path, number, submitted=100.0)
        (tmp_path / "mnist" / f"attempt-{number}" / LAUNCH).write_bytes(data)
    assert launches(tmp_path / "mnist") == [(whole, False)]
