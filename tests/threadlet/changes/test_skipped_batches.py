"""Which batches of a loader a script gets when some are to be left out."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest

from torchloom.settings import Settings
from torchloom.threadlet.changes.skipped_batches import SkippedBatches, batches
from torchloom.threadlet.threadlet import attach


class Training:
    """A script in a few words: it takes batches, and makes a step of every `each` of them."""

    def __init__(self, skipping: SkippedBatches | None, finished: int = 0, each: int = 1) -> None:
        self.skipping = skipping
        self.finished = finished
        self.each = each
        self.trained: dict[int, list[Any]] = {}

    def epoch(self, loader: Any, most: int = 1000, each: int = 1) -> list[Any]:
        taken = []
        for batch in batches(loader, self.waiting, lambda: self.finished, self.skipping, lambda: each):
            taken.append(batch)
            self.trained.setdefault(self.finished + 1, []).append(batch)
            if len(taken) % self.each == 0:
                self.finished += 1
            if len(taken) == most:
                break
        return taken

    def waiting(self) -> AbstractContextManager[None]:
        return nullcontext()


class Counting:
    """A loader that keeps its position."""

    def __init__(self, at: int = 0) -> None:
        self.at = at

    def __iter__(self) -> Iterator[int]:
        while self.at < 20:
            self.at += 1
            yield self.at

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}


def told(text: str, resumed: str = "") -> SkippedBatches | None:
    return SkippedBatches.from_environ({"TORCHLOOM_SKIP": text, "TORCHLOOM_RESUME_STEP": resumed})


def test_without_being_told_it_is_the_loader() -> None:
    assert told("") is None
    assert Training(None).epoch([1, 2, 3]) == [1, 2, 3]


@pytest.mark.parametrize("text", ["5", "5-4", "0-3", "a-b", "1-2-3", "-3"])
def test_what_makes_no_sense_is_not_obeyed(text: str) -> None:
    assert told(text) is None


def test_the_batches_of_the_steps_are_dropped_and_training_goes_on_with_the_next() -> None:
    training = Training(told("4-5"))
    assert training.epoch(range(1, 9)) == [1, 2, 3, 6, 7, 8]
    assert training.trained == {1: [1], 2: [2], 3: [3], 4: [6], 5: [7], 6: [8]}


def test_the_first_batch_of_all_can_be_dropped() -> None:
    assert Training(told("1-1")).epoch("abc") == ["b", "c"]


def test_after_a_checkpoint_from_before_them_they_are_dropped_again_and_from_after_them_not() -> None:
    loader = Counting(at=2)
    training = Training(told("4-4"), finished=2)
    assert training.epoch(loader, most=3) == [3, 5, 6]
    assert loader.state_dict() == {"at": 6}  # with what was dropped: five steps, six batches
    assert Training(told("4-4"), finished=5).epoch(Counting(at=6), most=2) == [7, 8]


def test_what_is_left_to_drop_at_the_end_of_an_epoch_is_dropped_in_the_next() -> None:
    training = Training(told("3-5"))
    assert training.epoch([1, 2, 3]) == [1, 2]
    assert training.epoch([4, 5, 6, 7]) == [6, 7]
    assert training.epoch([8]) == [8]


def test_a_step_of_several_batches_is_dropped_whole() -> None:
    training = Training(told("3-3"), each=2)
    assert training.epoch(range(1, 9)) == [1, 2, 3, 4, 7, 8]
    known = Training(told("3-3"), finished=2, each=2)  # none was seen, but the script has said how many
    assert known.epoch(range(5, 11), each=2) == [7, 8, 9, 10]


def test_a_script_that_tells_its_step_only_at_the_end_of_the_first_is_known_by_what_it_resumed_from() -> None:
    skipping = told("91-91", resumed="90")
    training = Training(skipping)
    assert training.epoch([91, 92, 93]) == [92, 93]


async def test_a_threadlet_drops_them_and_times_the_wait(lively: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHLOOM_SKIP", "2-3")
    loom = attach("job", "hi", settings=lively)
    taken, phases = [], []

    def loader() -> Iterator[int]:
        for number in range(1, 7):
            phases.append(loom._link.state.liveness.phase)  # type: ignore[union-attr]
            yield number

    for batch in loom.batches(loader()):
        taken.append(batch)
        loom.step()
    assert taken == [1, 4, 5, 6]
    assert set(phases[1:]) == {"data"}
    assert loom._meter is not None
    assert loom._meter.loading.latest > 0
    loom.close()
    assert list(loom.batches([1, 2])) == [1, 2]


def test_a_threadlet_that_is_off_gives_the_loader_itself() -> None:
    loom = attach("job", "hi", settings=Settings(off=True))
    source = iter([1])
    assert loom.batches(source) is source
