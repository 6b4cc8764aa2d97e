"""The same samples in the same order with the same bytes: as torch's DataLoader, and at any number of loaders."""

from __future__ import annotations

import random
import threading
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from tests.data.samples import Augmented, Kept, Large, Nested, Numbers, Record, equal
from torchloom.data import ElasticLoader

SAMPLERS = {
    "sequential": lambda data: {"sampler": SequentialSampler(data)},
    "random": lambda data: {"sampler": RandomSampler(data)},
    "replacement": lambda data: {"sampler": RandomSampler(data, replacement=True, num_samples=2 * len(data))},
    "own generator": lambda data: {"sampler": RandomSampler(data, generator=torch.Generator().manual_seed(7))},
    "subset": lambda data: {"sampler": SubsetRandomSampler(range(0, len(data), 2))},
    "weighted": lambda data: {"sampler": WeightedRandomSampler([1.0 + i for i in range(len(data))], len(data))},
    "distributed": lambda data: {"sampler": DistributedSampler(data, num_replicas=2, rank=1)},
    "list": lambda data: {"sampler": [0, 0, len(data) - 1]},
}


def epochs(kind: type[DataLoader[Any]], count: int, dataset: Dataset[Any], **arguments: Any) -> list[list[Any]]:
    torch.manual_seed(5)
    loader = kind(dataset, **arguments)
    return [list(loader) for _ in range(count)]


@settings(max_examples=12)
@given(st.data())
def test_equal_to_torch_without_random_numbers_in_the_dataset(data: st.DataObject) -> None:
    dataset = Numbers(data.draw(st.integers(1, 30)))
    sampler = SAMPLERS[data.draw(st.sampled_from(sorted(SAMPLERS)))]
    loaders = data.draw(st.integers(0, 3))
    arguments: dict[str, Any] = {"num_workers": loaders}
    if loaders:
        arguments["persistent_workers"] = data.draw(st.booleans())
        arguments["prefetch_factor"] = data.draw(st.integers(1, 3))
    batching = data.draw(st.sampled_from(["batch_size", "batch_sampler", "none"]))
    if batching == "batch_size":
        arguments |= {"batch_size": data.draw(st.integers(1, 7)), "drop_last": data.draw(st.booleans())}
    size = data.draw(st.integers(1, 5))

    def run(kind: type[DataLoader[Any]]) -> list[list[Any]]:
        if batching == "batch_sampler":
            how = {"batch_sampler": BatchSampler(sampler(dataset)["sampler"], size, drop_last=False)}
        else:
            how = sampler(dataset) | ({"batch_size": None} if batching == "none" else {})
        return epochs(kind, 2, dataset, **arguments, **how)

    assert equal(run(DataLoader), run(ElasticLoader))


@pytest.mark.parametrize("loaders", [0, 1, 2])
@pytest.mark.parametrize("dataset", [Large(20), Nested(20), Kept(20)], ids=["large", "nested", "getitems"])
def test_equal_to_torch_for_all_kinds_of_samples(dataset: Dataset[Any], loaders: int) -> None:
    theirs = epochs(DataLoader, 1, dataset, batch_size=3, shuffle=True)
    ours = epochs(ElasticLoader, 1, dataset, batch_size=3, shuffle=True, num_workers=loaders)
    if isinstance(dataset, Kept):  # the last column is random
        theirs, ours = ([[batch[:, :2].clone() for batch in batches] for batches in each] for each in (theirs, ours))
    assert equal(theirs, ours)


def collate_records(samples: list[Any]) -> list[Record]:
    return [Record(torch.stack(samples))]


@pytest.mark.filterwarnings("ignore:'pin_memory' argument")
@pytest.mark.parametrize("loaders", [0, 2])
def test_types_of_the_user_arrive_and_are_pinned_as_by_torch(loaders: int) -> None:
    arguments = {"batch_size": 4, "collate_fn": collate_records, "pin_memory": True, "num_workers": loaders}
    assert equal(epochs(DataLoader, 1, Large(10), **arguments), epochs(ElasticLoader, 1, Large(10), **arguments))


@pytest.mark.parametrize("dataset", [Augmented(23), Kept(23)], ids=["getitem", "getitems"])
@pytest.mark.parametrize("loaders", [1, 2, 3])
def test_random_numbers_in_samples_do_not_depend_on_the_number_of_loaders(loaders: int, dataset: Numbers) -> None:
    alone = epochs(ElasticLoader, 2, dataset, batch_size=4, shuffle=True)
    assert equal(alone, epochs(ElasticLoader, 2, dataset, batch_size=4, shuffle=True, num_workers=loaders))
    assert not equal(alone[0], alone[1])


def test_random_numbers_of_a_sample_do_not_depend_on_the_batch_size() -> None:
    def column(size: int) -> list[float]:
        return [value for batch in epochs(ElasticLoader, 1, Augmented(12), batch_size=size)[0] for value in batch[1]]

    assert column(3) == column(4)
    assert len(set(column(3))) == 12


def test_persistent_loaders_draw_other_numbers_in_the_next_epoch() -> None:
    first, second = epochs(ElasticLoader, 2, Augmented(12), batch_size=4, num_workers=2, persistent_workers=True)
    assert not equal(first, second)


def test_loading_in_the_training_process_leaves_its_random_numbers_alone() -> None:
    loader = ElasticLoader(Augmented(8), batch_size=2)
    iterator = iter(loader)
    next(iterator)
    torch.manual_seed(3), random.seed(3), numpy.random.seed(3)
    expected = torch.rand(1), random.random(), numpy.random.rand()
    torch.manual_seed(3), random.seed(3), numpy.random.seed(3)
    next(iterator)
    assert (torch.rand(1), random.random(), numpy.random.rand()) == expected


class Seeds(Numbers):
    def __getitem__(self, index: int) -> Any:
        information = torch.utils.data.get_worker_info()
        assert information is not None
        return torch.initial_seed(), information.seed, information.id, information.num_workers, random.random()


def test_seeding_by_worker_is_that_of_torch() -> None:
    ours = epochs(ElasticLoader, 1, Seeds(4), batch_size=4, num_workers=1, seeding="worker")
    assert equal(ours, epochs(DataLoader, 1, Seeds(4), batch_size=4, num_workers=1))


class InitialSeeds(Numbers):
    def __getitem__(self, index: int) -> Any:
        return torch.initial_seed()


def test_the_seeds_of_samples_differ_and_can_be_collated() -> None:
    seeds = torch.cat(list(ElasticLoader(InitialSeeds(50), batch_size=5)))
    assert len(set(seeds.tolist())) == 50


class Strided(Numbers):
    """What default_collate does not make: gaps, other strides, shared storages, gradients, empty tensors."""

    def __getitem__(self, index: int) -> Any:
        large = torch.arange(40_000.0).reshape(200, 200) + index
        leaf = torch.full((3,), float(index), requires_grad=True)
        parts = [large.t(), large[::2, ::3], large[0].expand(3, 200), torch.empty(0, 4), torch.tensor(index)]
        return [*parts, leaf, large]


def test_tensors_with_strides_arrive_as_from_the_training_process() -> None:
    alone = list(ElasticLoader(Strided(3), batch_size=None))
    assert equal(
        [[each.contiguous() for each in sample] for sample in alone],
        [
            [each.contiguous() for each in sample]
            for sample in ElasticLoader(Strided(3), batch_size=None, num_workers=1)
        ],
    )
    sample = next(iter(ElasticLoader(Strided(3), batch_size=None, num_workers=1)))
    assert sample[0].stride() == (1, 200)
    assert sample[5].requires_grad


class Varying(Numbers):
    def __getitem__(self, index: int) -> Any:
        return torch.full((1 + (index * 7919) % 60_000,), float(index))


def test_batches_of_many_sizes_reuse_memory_without_mixing_it_up() -> None:
    alone = list(ElasticLoader(Varying(200), batch_size=None))
    for expected, batch in zip(alone, ElasticLoader(Varying(200), batch_size=None, num_workers=2), strict=True):
        assert equal(expected, batch)


class Caching(Numbers):
    """Keeps what it collated: memory that must not be used for another batch."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.cache: dict[int, Any] = {}

    def __getitem__(self, index: int) -> Any:
        value = index % 10
        if value not in self.cache:
            self.cache[value] = torch.utils.data.default_collate([torch.full((LARGE_HALF,), float(value))] * 2)
        return self.cache[value]


LARGE_HALF = 10_000


def test_memory_that_the_dataset_keeps_is_not_overwritten() -> None:
    for number, batch in enumerate(ElasticLoader(Caching(60), batch_size=None, num_workers=1)):
        assert torch.equal(batch, torch.full((2, LARGE_HALF), float(number % 10)))


def test_large_index_lists_and_large_pickles_pass() -> None:
    class Texts(Numbers):
        def __getitem__(self, index: int) -> Any:
            return "x" * 10 + str(index)

    batches = list(ElasticLoader(Texts(60_000), batch_size=30_000, num_workers=1))
    assert [text for batch in batches for text in batch] == ["x" * 10 + str(index) for index in range(60_000)]


def test_two_loaders_in_one_process() -> None:
    first = ElasticLoader(Large(30), batch_size=4, num_workers=2)
    second = ElasticLoader(Numbers(30), batch_size=4, num_workers=1)
    seen = [(float(left[0, 0]), int(right[0, 0])) for left, right in zip(first, second, strict=True)]
    assert seen == [(float(index), index) for index in range(0, 30, 4)]


def test_in_a_thread_of_the_training_process() -> None:
    batches: list[Any] = []
    thread = threading.Thread(target=lambda: batches.extend(ElasticLoader(Numbers(8), batch_size=2, num_workers=2)))
    thread.start()
    thread.join()
    assert [int(batch[0, 0]) for batch in batches] == [0, 2, 4, 6]


def test_two_iterations_of_one_loader_at_a_time() -> None:
    loader = ElasticLoader(Numbers(8), batch_size=2, num_workers=1)
    assert all(equal(left, right) for left, right in zip(loader, loader, strict=True))


def test_dataset_changes_between_epochs_are_seen_without_persistent_workers() -> None:
    dataset = Numbers(4)
    loader = ElasticLoader(dataset, batch_size=4, num_workers=1)
    assert [len(batch) for batch in loader] == [4]
    dataset.__class__ = Large
    assert next(iter(loader)).shape[1] > 2


@pytest.mark.long
@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_start_methods_other_than_fork(method: str) -> None:
    theirs = epochs(DataLoader, 1, Nested(20), batch_size=3, shuffle=True)
    torch.manual_seed(5)
    loader = ElasticLoader(
        Nested(20), batch_size=3, shuffle=True, num_workers=2, multiprocessing_context=method, persistent_workers=True
    )
    ours = []
    for batch in loader:
        ours.append(batch)
        loader.resize(3)
    assert equal(theirs, [ours])
