"""Loader processes that die or hang are reported, with what they were doing."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from tests.data.samples import Numbers, kill, loaders
from torchloom.data import ElasticLoader, stage_times
from torchloom.data.loaders import loader_stacks
from torchloom.protocol.codec import decode_beat, encode
from torchloom.protocol.data_loading import Loading
from torchloom.protocol.rank import Beat


class Hanging(Numbers):
    """Sample `at` takes until a file appears."""

    def __init__(self, size: int, at: int, file: Path) -> None:
        super().__init__(size)
        self.at, self.file = at, file

    def __getitem__(self, index: int) -> Any:
        while index == self.at and not self.file.exists():
            time.sleep(0.01)
        return super().__getitem__(index)


def train(loader: ElasticLoader) -> tuple[threading.Thread, list[Any]]:
    """In another thread; the first batch is there."""
    batches: list[Any] = []

    def loop() -> None:
        for batch in loader:
            batches.append(batch)

    training = threading.Thread(target=loop)
    training.start()
    while not batches:
        time.sleep(0.01)
    return training, batches


def until_reported(loader: ElasticLoader) -> Loading:
    while (loading := loader.measure()).trouble is None:
        time.sleep(0.01)
    return loading


@pytest.mark.filterwarnings("ignore:loader 0")
def test_a_death_is_reported_while_it_is_recent(monkeypatch: pytest.MonkeyPatch) -> None:
    loader = ElasticLoader(Numbers(200), batch_size=2, num_workers=1)
    iterator = iter(loader)
    next(iterator)
    (process,) = loaders()
    kill(process)
    assert len(list(iterator)) == 99
    seen = loader.measure()
    assert seen.deaths == 1
    assert seen.trouble is not None
    assert (seen.trouble.what, seen.trouble.loader, seen.trouble.pid, seen.trouble.status) == (
        "died", 0, process.pid, -signal.SIGKILL,
    )  # fmt: skip
    assert seen.trouble.indices.startswith("["), "what it was loading"
    monkeypatch.setattr(stage_times, "RECENT_SECONDS", 0.0)
    assert loader.measure().trouble is None


@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_a_loader_that_hangs_is_named_with_its_stack(
    start: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stage_times, "HANG_SECONDS", 0.2)
    monkeypatch.setattr(stage_times, "HANG_FACTOR", 0.0)
    go = tmp_path / "go"
    loader = ElasticLoader(Hanging(20, 6, go), batch_size=2, num_workers=2, multiprocessing_context=start)
    training, batches = train(loader)
    loading = until_reported(loader)
    trouble = loading.trouble
    assert trouble is not None
    assert (trouble.what, trouble.indices) == ("hung", "[6, 7]")
    assert trouble.pid in [process.pid for process in loaders()]
    assert "test_troubles.py" in trouble.stack
    assert "loader_process.py" in trouble.stack.splitlines()[-1], "what started the process says nothing"
    assert loading.wait > 0.2, "the wait that is not over"
    beat = Beat(incarnation="1" * 24, step=1, loading=loading)
    assert decode_beat(encode(beat)) == beat
    go.touch()
    training.join()
    assert len(batches) == 10
    assert loader.measure().trouble is None


def test_the_state_of_a_loader_that_was_stopped_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stage_times, "HANG_SECONDS", 0.2)
    monkeypatch.setattr(stage_times, "HANG_FACTOR", 0.0)
    loader = ElasticLoader(Hanging(20, 6, tmp_path / "go"), batch_size=2, num_workers=1)
    training, batches = train(loader)
    (process,) = loaders()
    os.kill(process.pid, signal.SIGSTOP)
    trouble = until_reported(loader).trouble
    assert trouble is not None
    assert trouble.stack.startswith("state T")
    (tmp_path / "go").touch()
    os.kill(process.pid, signal.SIGCONT)
    training.join()
    assert len(batches) == 10


def test_processes_that_are_not_loaders_are_left_alone() -> None:
    assert loader_stacks.find(os.getpid(), 0) == 0
    assert loader_stacks.read(0) == ""
    assert loader_stacks.read(os.getpid()).startswith("state "), "which has prepared nothing, and is not signalled"


def test_a_warning_names_the_line_that_takes_batches() -> None:
    iterator = iter(ElasticLoader(Numbers(200), batch_size=2, num_workers=1))
    next(iterator)
    (process,) = loaders()
    kill(process)
    with pytest.warns(RuntimeWarning, match="loader 0") as caught:
        list(iterator)
    assert {Path(warning.filename).name for warning in caught} == {Path(__file__).name}
