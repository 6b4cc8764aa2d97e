"""Going back to an older step, and what lies in the way of a save: nothing just written is lost, nothing of others."""

from __future__ import annotations

import signal
import threading
from pathlib import Path

import pytest
import torch

from torchloom import Checkpoints
from torchloom.checkpoints.store.search import latest
from torchloom.errors import BadState, TorchLoomError


def steps(folder: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step-")) for path in folder.glob("step-*"))


def test_after_going_back_what_was_ahead_is_set_aside_and_the_new_line_is_followed(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2)
    state = {"x": torch.zeros(1)}
    for step in (300, 400, 500):
        checkpoints.save(step, state)
    checkpoints.wait()
    assert checkpoints.resume(state, step=400) == 400
    assert steps(tmp_path) == [400]
    assert len(list(tmp_path.glob("abandoned-step-500-*"))) == 1
    for step in (410, 420):
        checkpoints.save(step, state)
    checkpoints.wait()
    assert steps(tmp_path) == [410, 420]
    assert checkpoints.resume(state) == 420


def test_what_was_just_saved_is_never_deleted_by_its_own_rule(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=1)
    for step in (200, 150):
        checkpoints.save(step, {"x": 1})
    checkpoints.wait()
    assert steps(tmp_path) == [150, 200]


def test_what_somebody_else_put_in_the_place_of_a_checkpoint_is_not_deleted(tmp_path: Path) -> None:
    (tmp_path / "step-5").mkdir()
    (tmp_path / "step-5" / "model.safetensors").write_text("precious")
    (tmp_path / "step-6").write_text("x")
    checkpoints = Checkpoints(tmp_path)
    for step in (5, 6):
        assert checkpoints.save(step, {"x": step}) is not None
        checkpoints.wait()
    assert latest(tmp_path).step == 6
    assert [path.read_text() for path in tmp_path.glob("abandoned-step-5-*/*")] == ["precious"]
    assert [path.read_text() for path in tmp_path.glob("abandoned-step-6-*")] == ["x"]


def test_torch_files_beside_our_checkpoints_are_something_else(tmp_path: Path) -> None:
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(3, {"x": 1})
    torch.save({"a": 1}, tmp_path / "checkpoint_step_9.pt")
    torch.save({"a": 1}, tmp_path / "resnet50.pt")
    assert latest(tmp_path).step == 3
    (tmp_path / "alone").mkdir()
    torch.save({"a": 1}, tmp_path / "alone" / "resnet50.pt")
    with pytest.raises(TorchLoomError, match="no valid checkpoint"):
        latest(tmp_path / "alone")


def test_nothing_that_fits_is_refused_even_if_not_strict(tmp_path: Path) -> None:
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(3, {"x": 1})
        with pytest.raises(BadState, match="has none of model"):
            checkpoints.resume({"model": torch.nn.Linear(1, 1)}, strict=False)


def test_threads_that_save_at_once_each_save_their_own(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)

    def save(thread: int) -> None:
        for number in range(8):
            step = thread * 100 + number
            checkpoints.save(step, {"x": torch.full((200_000,), float(step))}, now=True)

    threads = [threading.Thread(target=save, args=(thread,)) for thread in (1, 2, 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    checkpoints.wait()
    for step in steps(tmp_path):
        assert torch.equal(checkpoints.load(step).state["x"], torch.full((200_000,), float(step)))
    assert len(steps(tmp_path)) == 24


def test_a_signal_handler_that_saves_inside_a_save_is_refused(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    refused: list[BaseException] = []

    class Slow:
        def state_dict(self) -> dict[str, int]:
            signal.raise_signal(signal.SIGUSR1)
            return {"a": 1}

        def load_state_dict(self, state: dict[str, int]) -> None: ...

    def handler(*_: object) -> None:
        try:
            checkpoints.save(2, {"x": 1}, now=True)
        except BadState as error:
            refused.append(error)

    before = signal.signal(signal.SIGUSR1, handler)
    try:
        checkpoints.save(1, {"slow": Slow()})
        checkpoints.wait()
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert len(refused) == 1
    assert steps(tmp_path) == [1]


def test_another_kind_of_optimizer_does_not_take_it(tmp_path: Path) -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, {"o": torch.optim.AdamW([weight])})
        checkpoints.wait()
        with pytest.raises(BadState, match="another kind of optimizer"):
            checkpoints.resume({"o": torch.optim.SGD([weight], lr=0.1, momentum=0.9)})


def test_a_traceback_shows_what_to_do_next(tmp_path: Path) -> None:
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(3, {"x": 1})
    with pytest.raises(BadState) as refused:
        checkpoints.load(7)
    assert refused.value.__notes__ == ["→ there are 3"]
