"""The knobs of the training loader, and how far it was at a step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from torchloom.data import ElasticLoader, training_loader
from torchloom.data.autotune import usable_cores
from torchloom.data.training_loader import KEPT_PLACES, YieldHistory
from torchloom.errors import BadInput
from torchloom.protocol.data_loading import DataPlace
from torchloom.protocol.rank import ChangeSpec, Propose, Verdict
from torchloom.settings import Settings
from torchloom.threadlet.changes.loader_knobs import batch_size_knob, loaders_knob
from torchloom.threadlet.changes.step_boundary import StepBoundary
from torchloom.threadlet.metrics.meter import Meter
from torchloom.threadlet.threadlet import Threadlet, attach

LIFE = "1" * 24


class Rank:
    """A boundary, as a threadlet uses it."""

    def __init__(self) -> None:
        self.meter = Meter()
        self.boundary = StepBoundary(LIFE, self.meter, Settings())
        self.fed: list[Any] = []

    @property
    def step_number(self) -> int:
        return self.meter.step_number

    def use_loader(self, loader: Any) -> None:
        self.fed.append(loader)
        self.boundary.replace(loaders_knob(loader))

    def step(self) -> None:
        number = self.meter.step(None, None, None, {})
        if number >= self.boundary.participant.due_step:
            self.boundary.on_step(number)

    def propose(self, step: int, finished: int, **values: Any) -> DataPlace | None:
        change = ChangeSpec(id="c1", number=1, step=step, values=values, finished=finished)
        ready = self.boundary.propose(Propose(term=1, incarnation=LIFE, job="job", change=change))
        assert ready.ok, ready.why
        self.boundary.hear(Verdict(term=1, incarnation=LIFE, id="c1", commit=True))
        return ready.place


@pytest.fixture
def rank(monkeypatch: pytest.MonkeyPatch) -> Iterator[Rank]:
    monkeypatch.setattr(training_loader, "_training_loader", None)
    rank = Rank()
    training_loader.register_threadlet(rank)
    yield rank
    training_loader.unregister_threadlet(rank)


def loader_of(total: int, size: int = 4, **arguments: Any) -> ElasticLoader:
    return ElasticLoader(TensorDataset(torch.arange(total)), batch_size=size, **arguments)


def test_the_loader_between_whose_batches_steps_are_made_feeds_the_training(rank: Rank) -> None:
    training, validation = loader_of(12), loader_of(12)
    for _ in validation:
        pass
    for number, _ in enumerate(training):
        assert rank.fed == ([training] if number >= 1 else [])
        rank.step()
    for _ in validation:
        pass
    assert rank.fed == [training]
    assert rank.boundary.values() == {"loaders": 0}


def test_a_threadlet_that_comes_later_learns_of_the_loader(rank: Rank) -> None:
    loader = loader_of(8)
    training_loader.set_loader(loader)
    later = Rank()
    training_loader.register_threadlet(later)
    training_loader.unregister_threadlet(later)
    assert later.fed == [loader]


def test_a_change_of_the_batch_size_takes_effect_before_the_first_batch_of_its_step(rank: Rank) -> None:
    loader = loader_of(60, num_workers=2)
    rank.boundary.add(batch_size_knob(loader, "batch"))
    sizes = []
    for (batch,) in loader:
        sizes.append(len(batch))
        if len(sizes) == 3:
            place = rank.propose(5, finished=2, batch_size=10)
            assert place == DataPlace(epoch=0, yielded=8, total=60), "when two steps were finished"
        rank.step()
    assert sizes == [4] * 5 + [10] * 4


def test_the_number_of_loaders_is_changed_and_needs_no_place(rank: Rank) -> None:
    loader = loader_of(40)
    training_loader.set_loader(loader)
    seen = []
    for (batch,) in loader:
        seen += batch.tolist()
        if len(seen) == 8:
            assert rank.propose(3, finished=1, loaders=2) is None
        rank.step()
    assert loader.num_workers == 2
    assert seen == list(range(40))


def test_the_answer_names_the_cores_if_there_are_more_loaders() -> None:
    knob = loaders_knob(loader_of(8))
    assert knob.turn(usable_cores()) == ""
    assert f"{usable_cores():,} core" in str(knob.turn(usable_cores() + 1))


def test_a_trainer_that_reads_the_length_once_gets_the_size_at_the_next_epoch(rank: Rank) -> None:
    loader = loader_of(24)
    knob = rank.boundary.add(batch_size_knob(loader, "epoch"))
    iterator = iter(loader)
    next(iterator)
    assert knob.turn(6) == "from the next epoch on"
    assert len(list(iterator)) == 5
    assert len(list(loader)) == 4


def test_a_loader_that_cannot_be_offered_does_not_stop_training(
    rank: Rank, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(_: Any) -> None:
        raise ValueError("a knob that is none")

    monkeypatch.setattr(rank, "use_loader", refuse)
    loader, seen = loader_of(12), 0
    for _ in loader:
        seen += 1
        rank.step()
    assert seen == 3
    assert "a knob that is none" in caplog.text


def test_a_loader_with_very_many_processes_is_offered() -> None:
    loader = loader_of(4)
    loader.num_workers = 600
    assert loaders_knob(loader).read() == 600


def test_how_far_a_loader_was_is_forgotten_after_many_batches() -> None:
    history = YieldHistory()
    assert history.place(5, 9) == DataPlace(epoch=-1, yielded=0, total=9), "it has yielded nothing"
    for step in range(KEPT_PLACES + 10):
        history.add(step, 0, step + 1)
    assert history.place(KEPT_PLACES, 9) == DataPlace(epoch=0, yielded=KEPT_PLACES, total=9)
    assert history.place(5, 9) is None


# What a script gives to watch()


@pytest.fixture
def silent(rank: Rank) -> Threadlet:
    """A threadlet that is off."""
    return attach("mnist", "r", settings=Settings(off=True))


def test_what_cannot_be_watched_is_refused_with_what_can(silent: Threadlet) -> None:
    data = TensorDataset(torch.arange(8))
    with pytest.raises(BadInput) as caught:
        silent.watch(DataLoader(data))
    assert "ElasticLoader.from_dataloader" in caught.value.hint
    for other in (data, None, "lr", torch.optim.lr_scheduler.StepLR(optimizer(), 1)):
        with pytest.raises(BadInput):
            silent.watch(other)
    silent.watch(optimizer())
    assert "lr" in silent.knobs


def test_the_moment_of_a_new_batch_size_is_checked_when_it_is_given(silent: Threadlet, rank: Rank) -> None:
    with pytest.raises(BadInput):
        silent.watch(loader_of(8), batch_size_at="now")  # type: ignore[arg-type]
    assert not rank.fed
    assert not silent.knobs


def optimizer() -> torch.optim.Optimizer:
    return torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
