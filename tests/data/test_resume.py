"""state_dict and load_state_dict in the middle of an epoch: the rest is the same, whatever the number of loaders."""

from __future__ import annotations

import copy
import io
import random
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import numpy
import pytest
import torch
from torch.utils.data import BatchSampler, DistributedSampler, RandomSampler, SequentialSampler

from tests.data.samples import Augmented, Lines, Numbers, equal, loaders
from torchloom.checkpoints.api import Checkpoints
from torchloom.data import ElasticLoader
from torchloom.errors import BadInput, BadState

SIZE = 26


class StatefulSampler:
    """A sampler with a state of its own: each epoch begins one further."""

    def __init__(self) -> None:
        self.begun = 0

    def __iter__(self) -> Iterator[int]:
        self.begun += 1
        return iter([(index + self.begun) % SIZE for index in range(SIZE)])

    def __len__(self) -> int:
        return SIZE

    def state_dict(self) -> dict[str, int]:
        return {"begun": self.begun}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.begun = state["begun"]


class ShuffledBy:
    """A sampler that draws from another generator of the process than torch's."""

    def __init__(self, shuffle: Callable[[list[int]], None]) -> None:
        self.shuffle = shuffle

    def __iter__(self) -> Iterator[int]:
        order = list(range(SIZE))
        self.shuffle(order)
        return iter(order)

    def __len__(self) -> int:
        return SIZE


class EverySecond:
    """The batches of one rank of two, around a sampler of batches of all ranks, as accelerate builds them."""

    def __init__(self, batch_sampler: BatchSampler) -> None:
        self.batch_sampler = batch_sampler

    def __iter__(self) -> Iterator[list[int]]:
        return islice(self.batch_sampler, 0, None, 2)


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(4)


def own_batches(data: Any) -> BatchSampler:
    return BatchSampler(RandomSampler(data, generator=generator()), 3, drop_last=False)


HOW = {
    "sequential": lambda data: {"batch_size": 4},
    "shuffled": lambda data: {"batch_size": 4, "shuffle": True},
    "drop last": lambda data: {"batch_size": 4, "shuffle": True, "drop_last": True},
    "own generator": lambda data: {"batch_size": 4, "shuffle": True, "generator": generator()},
    "sampler's generator": lambda data: {"batch_size": 4, "sampler": RandomSampler(data, True, 50, generator())},
    "batch sampler": lambda data: {"batch_sampler": BatchSampler(RandomSampler(data), 3, drop_last=False)},
    "batches of a rank": lambda data: {"batch_sampler": EverySecond(own_batches(data))},
    "single samples": lambda data: {"batch_size": None, "shuffle": True},
    "distributed": lambda data: {"batch_size": 4, "sampler": DistributedSampler(data, num_replicas=2, rank=0)},
    "stateful sampler": lambda data: {"batch_size": 4, "sampler": StatefulSampler()},
}


def make(how: str, count: int = 0, **arguments: Any) -> ElasticLoader:
    dataset = Augmented(SIZE)
    return ElasticLoader(dataset, num_workers=count, **HOW[how](dataset), **arguments)


def through_a_file(state: Any) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("how", HOW)
def test_the_rest_of_an_epoch_and_the_next_are_the_same_from_every_batch(how: str) -> None:
    torch.manual_seed(1)
    loader = make(how)
    list(loader)
    if how == "distributed":
        loader.sampler.set_epoch(1)
    states, batches = [], []
    iterator = iter(loader)
    states.append(loader.state_dict())
    random_numbers = [torch.get_rng_state()]
    for batch in iterator:
        batches.append(batch)
        states.append(through_a_file(loader.state_dict()))
        random_numbers.append(torch.get_rng_state())
    following = list(loader)
    for number, state in enumerate(states):
        torch.manual_seed(1000 + number)
        resumed = make(how)
        resumed.load_state_dict(state)
        assert equal(resumed.state_dict(), state)
        torch.set_rng_state(random_numbers[number])
        assert equal(list(resumed), batches[number:])
        if number > 0:  # before the first batch the sampler had not drawn from the generators of the process
            assert equal(list(resumed), following)


@pytest.mark.parametrize("shuffle", [random.shuffle, numpy.random.shuffle])
@pytest.mark.parametrize("in_batches", [False, True])
def test_a_sampler_of_the_user_may_draw_from_any_generator(shuffle: Any, in_batches: bool) -> None:
    def make_loader() -> ElasticLoader:
        sampler = ShuffledBy(shuffle)
        if in_batches:
            return ElasticLoader(Numbers(SIZE), batch_sampler=BatchSampler(sampler, 4, drop_last=False))
        return ElasticLoader(Numbers(SIZE), batch_size=4, sampler=sampler)

    random.seed(1)
    numpy.random.seed(1)
    loader = make_loader()
    iterator = iter(loader)
    next(iterator)
    state = through_a_file(loader.state_dict())
    rest = list(iterator)
    random.seed(99)
    numpy.random.seed(99)
    resumed = make_loader()
    resumed.load_state_dict(state)
    assert equal(list(resumed), rest)


@pytest.mark.parametrize(("before", "after"), [(2, 0), (0, 2), (2, 1)])
@pytest.mark.parametrize("persistent", [False, True])
def test_the_position_does_not_depend_on_the_number_of_loaders(before: int, after: int, persistent: bool) -> None:
    torch.manual_seed(1)
    loader = make("shuffled", before, persistent_workers=persistent and before > 0)
    iterator = iter(loader)
    first = [next(iterator) for _ in range(3)]
    state = loader.state_dict()
    assert (state["batches"], state["samples"], len(first)) == (3, 12, 3)
    rest = list(iterator)
    resumed = make("shuffled", after, persistent_workers=persistent and after > 0)
    resumed.load_state_dict(state)
    assert equal(list(resumed), rest)


def test_resuming_in_mid_epoch_leaves_the_random_numbers_of_training_alone() -> None:
    loader = make("shuffled")
    next(iter(loader))
    state = loader.state_dict()
    resumed = make("shuffled", 1)
    resumed.load_state_dict(state)
    torch.manual_seed(8)
    before = torch.get_rng_state()
    list(resumed)
    assert torch.equal(torch.get_rng_state(), before)


def test_another_batch_size_continues_at_the_same_sample() -> None:
    torch.manual_seed(1)
    loader = make("shuffled")
    iterator = iter(loader)
    next(iterator)
    state = loader.state_dict()
    rest = [column for batch in iterator for column in batch[1].tolist()]
    resumed = ElasticLoader(Augmented(SIZE), batch_size=7, shuffle=True)
    resumed.load_state_dict(state)
    assert [column for batch in resumed for column in batch[1].tolist()] == rest


def test_after_the_last_batch_the_epoch_is_empty_and_after_its_end_the_next_begins() -> None:
    torch.manual_seed(1)
    loader = make("own generator")
    iterator = iter(loader)
    for _ in range(len(loader)):
        next(iterator)
    before_the_end = loader.state_dict()
    assert next(iterator, None) is None
    after_the_end = loader.state_dict()
    following = list(loader)
    resumed = make("own generator")
    resumed.load_state_dict(before_the_end)
    assert list(resumed) == []
    assert equal([batch[0] for batch in resumed], [batch[0] for batch in following])
    resumed = make("own generator")
    resumed.load_state_dict(after_the_end)
    assert equal(list(resumed), following)


def test_before_the_first_epoch() -> None:
    loader = make("own generator")
    state = loader.state_dict()
    epoch = [batch[0] for batch in loader]
    loader.load_state_dict(state)
    assert equal([batch[0] for batch in loader], epoch)


def test_after_a_break_the_position_is_kept_until_the_next_iteration() -> None:
    loader = make("shuffled", 2)
    iterator = iter(loader)
    next(iterator)
    state = loader.state_dict()
    rest = list(iterator)
    loader.load_state_dict(state)
    for batch in loader:
        assert equal(batch, rest[0])
        break
    assert loader.state_dict()["batches"] == 2
    loader.load_state_dict(loader.state_dict())
    assert equal(list(loader), rest[1:])


@pytest.mark.parametrize("count", [0, 2])
def test_batches_out_of_order_are_resumed_once_each(count: int) -> None:
    loader = ElasticLoader(Augmented(40), batch_size=2, num_workers=3, in_order=False)
    iterator = iter(loader)
    seen = [tuple(next(iterator)[0].tolist())]
    loaders()[0].kill()
    seen += [tuple(next(iterator)[0].tolist()) for _ in range(5)]
    state = through_a_file(loader.state_dict())
    assert state["ahead"]
    resumed = ElasticLoader(Augmented(40), batch_size=2, num_workers=count)
    resumed.load_state_dict(state)
    with pytest.raises(BadInput, match="in mid-epoch"):
        resumed.change_batch_size(4)
    seen += [tuple(batch[0].tolist()) for batch in resumed]
    assert sorted(seen) == [(index, index + 1) for index in range(0, 40, 2)]


class FailsOnce(SequentialSampler):
    fails = True

    def __iter__(self) -> Any:
        if self.fails:
            self.fails = False
            raise ValueError("not yet")
        return super().__iter__()


def test_an_iteration_that_could_not_begin_is_resumed_by_the_next() -> None:
    dataset = Augmented(12)
    loader = ElasticLoader(dataset, batch_size=2, sampler=SequentialSampler(dataset))
    whole = list(loader)
    next(iter(loader))
    state = loader.state_dict()
    state["start"]["order"] = {"sampler": ["FailsOnce", 12]}
    resumed = ElasticLoader(dataset, batch_size=2, sampler=FailsOnce(dataset))
    resumed.load_state_dict(state)
    with pytest.raises(ValueError, match="not yet"):
        iter(resumed)
    assert len(list(resumed)) == len(whole) - 1


def test_in_a_checkpoint(tmp_path: Any) -> None:
    torch.manual_seed(1)
    loader = make("shuffled", 2)
    iterator = iter(loader)
    next(iterator)
    with_loader = Checkpoints(tmp_path)
    with_loader.save(1, {"loader": loader})
    with_loader.wait(60)
    rest = list(iterator)
    resumed = make("shuffled")
    assert Checkpoints(tmp_path).resume({"loader": resumed}) == 1
    assert equal(list(resumed), rest)


@pytest.mark.parametrize(
    "state",
    [
        {}, None, {"epoch": 3}, {"version": 1}, {"version": 1, "epoch": "a"}, {"version": 1, "epoch": 0, "start": {}},
        {"version": 1, "epoch": -1, "start": {}},
    ],
)  # fmt: skip
def test_what_is_no_state(state: Any) -> None:
    with pytest.raises(BadState, match="not the state of an ElasticLoader"):
        make("shuffled").load_state_dict(state)


def other_size() -> ElasticLoader:
    return ElasticLoader(Augmented(SIZE - 1), batch_size=4)


@pytest.mark.parametrize(
    ("resumed", "why"),
    [
        (lambda: make("own generator"), "0 generators, and the loader has 1"),
        (lambda: make("sequential"), f"a RandomSampler of {SIZE} indices, and the loader has a SequentialSampler"),
        (other_size, f"the loader has a SequentialSampler of {SIZE - 1} indices"),
    ],
)
def test_a_state_of_another_loader_is_refused_and_changes_nothing(resumed: Any, why: str) -> None:
    saved = make("shuffled")
    next(iter(saved))
    loader = resumed()
    before = loader.state_dict()
    with pytest.raises(BadState, match=why):
        loader.load_state_dict(saved.state_dict())
    assert loader.state_dict().keys() == before.keys()
    assert len(list(loader)) == len(loader)


def test_batches_yielded_out_of_order_are_continued_in_the_same_size_only() -> None:
    loader = ElasticLoader(Numbers(40), batch_size=4, num_workers=2, in_order=False)
    state = {**loader.state_dict(), "epoch": 0, "base_seed": 1, "is_over": False, "batches": 1, "samples": 4}
    state |= {"ahead": {2: 4}, "batch_size": 4}
    state["start"]["draws_base_seed"] = True
    with pytest.raises(BadState, match="batch_size=4"):
        ElasticLoader(Numbers(40), batch_size=5).load_state_dict(state)
    loader.load_state_dict(state)
    assert sorted(int(index) for batch in loader for index in batch[:, 0]) == [*range(4, 8), *range(12, 40)]


@pytest.mark.parametrize("in_order", [True, False])
def test_a_size_for_the_next_epoch_does_not_change_the_rest_of_this_one(in_order: bool) -> None:
    loader = ElasticLoader(Numbers(20), batch_size=4, num_workers=2, in_order=in_order)
    iterator = iter(loader)
    seen = [next(iterator) for _ in range(2)]
    resumed = ElasticLoader(Numbers(20), batch_size=4, num_workers=2, in_order=in_order)
    resumed.load_state_dict(loader.state_dict())
    resumed.change_batch_size(10, at="epoch")
    seen += resumed
    assert sorted(int(index) for batch in seen for index in batch[:, 0]) == list(range(20))
    assert {len(batch) for batch in seen} == {4}
    assert [len(batch) for batch in resumed] == [10, 10]


def damages(state: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place in a state."""
    entries = state.items() if isinstance(state, dict) else enumerate(state) if isinstance(state, list) else ()
    for key, value in entries:
        yield (*path, key)
        yield from damages(value, (*path, key))


def damaged(state: Any, path: tuple[Any, ...], value: Any) -> Any:
    result = copy.deepcopy(state)
    inner = result
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    return result


@pytest.mark.parametrize("over", [False, True])
@pytest.mark.parametrize("dataset", [Numbers(20), Lines(20)], ids=["indices", "shards"])
def test_a_damaged_state_is_refused_or_can_be_continued(dataset: Any, over: bool) -> None:
    def build() -> ElasticLoader[Any]:
        arguments: dict[str, Any] = {"shards": 2} if isinstance(dataset, Lines) else {"shuffle": True}
        return ElasticLoader(dataset, batch_size=3, generator=torch.Generator(), **arguments)

    loader = build()
    iterator = iter(loader)
    for _ in iterator if over else range(2):
        next(iterator, None)
    state = loader.state_dict()
    build().load_state_dict(state)
    refused = 0
    for path in damages(state):
        for value in (None, "x", -5, 10**6, 1.5, [1], {}, {"a": "b"}, [torch.zeros(3)], ["a", "b"], [-3, -3]):
            other = build()
            before = other.generator.get_state()
            try:
                other.load_state_dict(damaged(state, path, value))
            except BadState:
                refused += 1
                assert torch.equal(other.generator.get_state(), before)
            else:
                list(other)
    assert refused > 100


def test_an_iteration_from_before_a_state_was_loaded_says_so() -> None:
    loader = ElasticLoader(Numbers(40), batch_size=2, num_workers=1, persistent_workers=True)
    iterator = iter(loader)
    next(iterator)
    state = loader.state_dict()
    loader.load_state_dict({**state, "base_seed": state["base_seed"] + 1})
    with pytest.raises(RuntimeError, match="has loaded a state since"):
        list(iterator)
    assert len(list(loader)) == 19
