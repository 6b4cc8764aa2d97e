"""The batch size changes while a loader runs: at the batches yielded so far, with every index used once."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from itertools import islice
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, RandomSampler, SequentialSampler

from tests.data.samples import Augmented, Large, Numbers, equal, kill, loaders
from torchloom.data import ElasticLoader
from torchloom.data.batch_cutter import BatchCutter
from torchloom.errors import BadInput

Changes = dict[int, int]
"""After this number of batches, this size."""


def expected(indices: list[Any], size: int, changes: Changes, drop_last: bool) -> list[list[Any]]:
    """The rule, without any reading ahead."""
    batches: list[list[Any]] = []
    while indices:
        size = changes.get(len(batches), size)
        batch, indices = indices[:size], indices[size:]
        if len(batch) == size or not drop_last:
            batches.append(batch)
    return batches


def collected(loader: ElasticLoader, changes: Changes) -> list[Any]:
    batches: list[Any] = []
    iterator = iter(loader)
    while True:
        if len(batches) in changes:
            loader.change_batch_size(changes[len(batches)])
        try:
            batches.append(next(iterator))
        except StopIteration:
            return batches


def shuffled(dataset: Any, count: int, size: int = 4, **arguments: Any) -> ElasticLoader:
    torch.manual_seed(3)
    return ElasticLoader(dataset, batch_size=size, shuffle=True, num_workers=count, **arguments)


def whole(batches: list[Any]) -> list[int]:
    return [int(index) for batch in batches for index in batch[:, 0]]


@given(st.integers(0, 40), st.integers(1, 9), st.booleans())
def test_uncut_batches_are_those_of_torch(total: int, size: int, drop_last: bool) -> None:
    ours = [batch.indices for batch in BatchCutter(range(total), size, drop_last)]
    assert ours == list(BatchSampler(SequentialSampler(range(total)), size, drop_last))


@given(st.data())
def test_what_is_cut_does_not_depend_on_what_was_drawn_ahead(data: st.DataObject) -> None:
    total, size = data.draw(st.integers(0, 40)), data.draw(st.integers(1, 9))
    drop_last = data.draw(st.booleans())
    changes = data.draw(st.dictionaries(st.integers(0, 10), st.integers(1, 9), max_size=4))
    cutter = BatchCutter(range(total), size, drop_last)
    drawn: list[Any] = []
    yielded: list[Any] = []
    while True:
        if len(yielded) in changes:
            cutter.cut_again(changes[len(yielded)], drawn)
            drawn = []
        drawn += islice(cutter, data.draw(st.integers(0, 3)) if drawn else data.draw(st.integers(1, 4)))
        if not drawn:
            break
        yielded.append(drawn.pop(0))
    assert [batch.indices for batch in yielded] == expected(list(range(total)), size, changes, drop_last)
    assert [batch.number for batch in yielded] == list(range(len(yielded)))
    assert [batch.position for batch in yielded] == [batch.indices[0] for batch in yielded]


@pytest.mark.parametrize("count", [0, 1, 3])
@pytest.mark.parametrize("prefetch", [1, 3])
@pytest.mark.parametrize("drop_last", [False, True])
def test_every_index_is_used_once_whatever_is_loaded_ahead(count: int, prefetch: int, drop_last: bool) -> None:
    changes = {0: 5, 2: 3, 3: 8, 6: 1, 9: 7}
    order = whole(list(shuffled(Numbers(61), 0, size=1)))
    given = {} if count == 0 else {"prefetch_factor": prefetch}
    loader = shuffled(Numbers(61), count, drop_last=drop_last, **given)
    batches = [whole([batch]) for batch in collected(loader, changes)]
    assert batches == expected(order, 4, changes, drop_last)


@pytest.mark.parametrize("dataset", [Augmented(50), Large(50)], ids=["augmented", "large"])
def test_the_bytes_are_the_same_at_any_number_of_loaders(dataset: Numbers) -> None:
    changes = {1: 2, 5: 9}
    alone = collected(shuffled(dataset, 0), changes)
    assert equal(alone, collected(shuffled(dataset, 2), changes))


def test_what_was_loaded_ahead_is_counted() -> None:
    loader = shuffled(Numbers(60), 2)
    iterator = iter(loader)
    next(iterator)
    loader.change_batch_size(6)
    assert 1 <= iterator.recut <= 4
    loader.change_batch_size(6)
    assert iterator.recut <= 4, "the same size again cuts nothing"


def test_the_last_indices_that_were_to_be_dropped_are_cut_too() -> None:
    loader = ElasticLoader(Numbers(11), batch_size=4, drop_last=True, num_workers=1, prefetch_factor=8)
    iterator = iter(loader)
    batches = [next(iterator), next(iterator)]
    loader.change_batch_size(3)
    assert whole([*batches, *iterator]) == list(range(11))


def test_the_length_follows() -> None:
    loader = shuffled(Numbers(20), 0)
    iterator = iter(loader)
    assert (len(loader), len(iterator)) == (5, 5)
    next(iterator)
    loader.change_batch_size(8)
    assert (len(loader), len(iterator)) == (3, 3)
    assert len(list(iterator)) == 2
    assert len(loader) == 3, "of the next epoch, 20 in batches of 8"
    assert len(list(loader)) == 3


def test_a_change_at_the_next_epoch() -> None:
    loader = shuffled(Numbers(20), 2)
    iterator = iter(loader)
    next(iterator)
    loader.change_batch_size(10, at="epoch")
    assert (len(list(iterator)), loader.batch_size) == (4, 4)
    assert (len(list(loader)), loader.batch_size) == (2, 10)


@pytest.mark.parametrize("persistent", [False, True])
def test_deaths_after_a_change_lose_nothing(persistent: bool) -> None:
    order = whole(list(shuffled(Numbers(80), 0)))
    loader = shuffled(Numbers(80), 2, persistent_workers=persistent)
    batches = []
    for number, batch in enumerate(loader):
        batches.append(batch)
        if number in {2, 5}:
            loader.change_batch_size(3 + number)
            kill(loaders()[0])
    assert whole(batches) == order


def test_a_resumed_epoch_is_cut_again_too() -> None:
    loader = shuffled(Numbers(40), 2)
    iterator = iter(loader)
    seen = [next(iterator)]
    loader.change_batch_size(6)
    seen.append(next(iterator))
    state = loader.state_dict()
    rest = whole(list(iterator))
    fresh = shuffled(Numbers(40), 0, size=6)
    fresh.load_state_dict(state)
    again = iter(fresh)
    first = next(again)
    fresh.change_batch_size(1)
    assert whole([first, *again]) == rest


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"batch_sampler": BatchSampler(SequentialSampler(range(8)), 2, False)}, "a batch_sampler fixes"),
        ({"batch_size": None}, "batch_size=None fixes"),
        ({"batch_size": 2, "num_workers": 1, "in_order": False}, "in_order=False"),
    ],
)
def test_a_loader_whose_size_is_fixed_refuses(arguments: dict[str, Any], says: str) -> None:
    with pytest.raises(BadInput, match=says):
        ElasticLoader(Numbers(8), **arguments).change_batch_size(4)


@pytest.mark.parametrize("size", [0, -1, 1.5, True, "4", None])
def test_a_size_that_is_none(size: Any) -> None:
    with pytest.raises(BadInput):
        ElasticLoader(Numbers(8), batch_size=2).change_batch_size(size)


# From places where the loader is at work


class Meddling(RandomSampler):
    """Changes the loader while it is asked for indices."""

    loader: ElasticLoader | None = None

    def __iter__(self) -> Iterator[int]:
        for place, index in enumerate(super().__iter__()):
            if self.loader is not None and place % 7 == 0:
                self.loader.resize(place % 3)
                self.loader.change_batch_size(2 + place % 3)
            yield index


@pytest.mark.parametrize("count", [0, 2])
def test_from_a_sampler(count: int) -> None:
    sampler = Meddling(range(50))  # type: ignore[arg-type]
    loader = ElasticLoader(Numbers(50), batch_size=4, sampler=sampler, num_workers=count)
    sampler.loader = loader
    assert sorted(whole(list(loader))) == list(range(50))


def test_from_a_signal_handler() -> None:
    loader = shuffled(Numbers(300), 2)
    calls = 0

    def handle(*_: object) -> None:
        nonlocal calls
        calls += 1
        loader.resize(1 + calls % 3)
        loader.change_batch_size(2 + calls % 4)

    before = signal.signal(signal.SIGALRM, handle)
    signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
    try:
        batches = list(loader)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert calls
    assert sorted(whole(batches)) == list(range(300))


class Selfish(Numbers):
    loader: Any = None

    def __getitem__(self, index: int) -> Any:
        self.loader.resize(3)
        return super().__getitem__(index)


def test_a_loader_process_is_told_that_it_cannot() -> None:
    dataset = Selfish(8)
    dataset.loader = ElasticLoader(dataset, batch_size=2, num_workers=1)
    with pytest.raises(BadInput, match="cannot change its own loader"):
        list(dataset.loader)
