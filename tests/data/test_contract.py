"""What torch documents of its DataLoader, shown with torch's own and with an ElasticLoader.

A test that passes with both says that this is torch's contract, and that we keep it. What only an ElasticLoader does is
in the other files.
"""

from __future__ import annotations

import collections
import gc
import multiprocessing
import os
import time
from dataclasses import dataclass
from typing import Any

import numpy
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    Dataset,
    RandomSampler,
    StackDataset,
    Subset,
    TensorDataset,
    default_convert,
    get_worker_info,
    random_split,
)

from tests.data.samples import Failing, Kept, Numbers, Pair, equal
from torchloom.data import ElasticLoader
from torchloom.errors import LoaderTimeout

Kind = type[DataLoader[Any]]
pytestmark = pytest.mark.parametrize("kind", [DataLoader, ElasticLoader])
both = pytest.mark.parametrize("loaders", [0, 2])
"""In the training process, and in loader processes."""


def firsts(batches: Any) -> list[int]:
    """The index of the first sample in each batch of Numbers."""
    return [int(batch[0, 0]) for batch in batches]


def failure(loader: DataLoader[Any]) -> Exception:
    """What an iteration raises.

    Without its traceback, which would keep torch's iterator alive until the garbage collector closes its queues, in the
    middle of a later test.
    """
    iterator = iter(loader)
    try:
        batches = list(iterator)
    except Exception as error:  # noqa: BLE001
        return error.with_traceback(None)
    raise AssertionError(f"no exception, but {len(batches)} batches")


# Arguments


@pytest.mark.parametrize(
    ("error", "arguments"),
    [
        (ValueError, {"num_workers": 1, "prefetch_factor": -1}),
        (ValueError, {"shuffle": True, "batch_sampler": [[0]]}),
        (ValueError, {"drop_last": True, "batch_sampler": [[0]]}),
        (ValueError, {"sampler": [0], "batch_sampler": [[0]]}),
        (ValueError, {"batch_size": 0}),
        (ValueError, {"batch_size": -2}),
        (ValueError, {"batch_size": 1.5}),
        (ValueError, {"num_workers": 1, "multiprocessing_context": "thread"}),
        (TypeError, {"num_workers": 1, "multiprocessing_context": 7}),
        (TypeError, {"loaders": 2}),
    ],
    ids=lambda value: "" if isinstance(value, type) else str(value),
)
def test_arguments_that_do_not_fit_are_refused(kind: Kind, error: type[Exception], arguments: dict[str, Any]) -> None:
    with pytest.raises(error):
        kind(Numbers(4), **arguments)


@both
def test_a_dataset_without_samples(kind: Kind, loaders: int) -> None:
    assert list(kind(Numbers(0), num_workers=loaders)) == []


@pytest.mark.parametrize(
    "name", ["batch_size", "batch_sampler", "sampler", "drop_last", "dataset", "persistent_workers"]
)
def test_what_defines_the_batches_cannot_be_set_later(kind: Kind, name: str) -> None:
    loader = kind(Numbers(4))
    with pytest.raises(ValueError, match=name):
        setattr(loader, name, None)


def test_a_context_without_workers_cannot_be_set_later(kind: Kind) -> None:
    loader = kind(Numbers(4))
    with pytest.raises(ValueError):
        loader.multiprocessing_context = "spawn"


def test_very_many_workers_give_a_warning(kind: Kind) -> None:
    with pytest.warns(UserWarning, match="suggested max number of worker"):
        kind(Numbers(4), num_workers=10_000)


def test_defaults(kind: Kind) -> None:
    alone, helped = kind(Numbers(4)), kind(Numbers(4), num_workers=1)
    assert (alone.batch_size, alone.drop_last, alone.timeout, alone.pin_memory) == (1, False, 0, False)
    assert (alone.num_workers, alone.prefetch_factor, alone.persistent_workers, alone.in_order) == (
        0,
        None,
        False,
        True,
    )
    assert helped.prefetch_factor == 2


# Batches


@dataclass
class Point:
    across: int
    down: int


class Sentence(str):
    pass


def same(value: Any) -> Any:
    return value


@pytest.mark.parametrize(
    ("samples", "batch"),
    [
        ([1, 2], torch.tensor([1, 2])),
        ([1.5, 2.5], torch.tensor([1.5, 2.5], dtype=torch.float64)),
        ([True, False], torch.tensor([True, False])),
        (["a", "b"], ["a", "b"]),
        ([b"a", b"b"], [b"a", b"b"]),
        ([Sentence("a"), Sentence("b")], [Sentence("a"), Sentence("b")]),
        ([torch.ones(2), torch.zeros(2)], torch.tensor([[1.0, 1.0], [0.0, 0.0]])),
        ([torch.ones(0), torch.ones(0)], torch.ones(2, 0)),
        ([numpy.ones(2, dtype="int16"), numpy.zeros(2, dtype="int16")], torch.tensor([[1, 1], [0, 0]]).short()),
        ([numpy.float32(1), numpy.float32(2)], torch.tensor([1.0, 2.0])),
        ([numpy.uint8(1), numpy.uint8(2)], torch.tensor([1, 2], dtype=torch.uint8)),
        ([{"x": 1, "y": "a"}, {"x": 2, "y": "b"}], {"x": torch.tensor([1, 2]), "y": ["a", "b"]}),
        ([(1, "a"), (2, "b")], [torch.tensor([1, 2]), ("a", "b")]),
        ([[1, 2], [3, 4]], [torch.tensor([1, 3]), torch.tensor([2, 4])]),
        ([Pair(1, 2), Pair(3, 4)], Pair(torch.tensor([1, 3]), torch.tensor([2, 4]))),
        (
            [collections.OrderedDict(z=1, a=2), collections.OrderedDict(z=3, a=4)],
            collections.OrderedDict(z=torch.tensor([1, 3]), a=torch.tensor([2, 4])),
        ),
        ([range(2), range(2)], [torch.tensor([0, 0]), torch.tensor([1, 1])]),
    ],
    ids=lambda value: type(value[0]).__name__ if isinstance(value, list) else "",
)
@both
def test_the_default_collation(kind: Kind, samples: list[Any], batch: Any, loaders: int) -> None:
    assert equal(list(kind(samples, batch_size=2, num_workers=loaders)), [batch])


@pytest.mark.parametrize(
    ("error", "samples"),
    [
        (TypeError, [Point(1, 2), Point(3, 4)]),
        (TypeError, [None, None]),
        (TypeError, [numpy.array(["a"]), numpy.array(["b"])]),
        (RuntimeError, [[1], [1, 2]]),
        (RuntimeError, [torch.ones(1), torch.ones(2)]),
        (KeyError, [{"x": 1}, {"y": 1}]),
    ],
    ids=["dataclass", "None", "array of strings", "lengths", "shapes", "keys"],
)
@both
def test_samples_that_cannot_be_collated(kind: Kind, error: type[Exception], samples: list[Any], loaders: int) -> None:
    assert isinstance(failure(kind(samples, batch_size=2, num_workers=loaders)), error)


@both
def test_a_collation_of_the_users(kind: Kind, loaders: int) -> None:
    points = [Point(1, 2), Point(3, 4), Point(5, 6)]
    assert list(kind(points, batch_size=2, collate_fn=same, num_workers=loaders)) == [points[:2], points[2:]]


@both
def test_single_samples_are_converted_and_not_collated(kind: Kind, loaders: int) -> None:
    samples = [numpy.ones(3), "text", 7, {"x": numpy.zeros(2)}, torch.ones(2)]
    batches = list(kind(samples, batch_size=None, num_workers=loaders))
    assert equal(batches, [default_convert(sample) for sample in samples])
    raw = list(kind([1, 2], batch_size=None, collate_fn=str, num_workers=loaders))
    assert raw == ["1", "2"]


class Bulk(Numbers):
    """A dataset whose indices are whole lists, as for a bulk read from a database."""

    def __getitem__(self, index: Any) -> Any:
        return torch.tensor(index)


@both
def test_a_batch_sampler_as_sampler_gives_the_dataset_whole_lists(kind: Kind, loaders: int) -> None:
    batches = list(kind(Bulk(5), batch_size=None, sampler=[[0, 1], [2, 3, 4]], num_workers=loaders))
    assert equal(batches, [torch.tensor([0, 1]), torch.tensor([2, 3, 4])])


@both
def test_a_dataset_may_load_a_whole_list(kind: Kind, loaders: int) -> None:
    batches = list(kind(Kept(5), batch_size=2, num_workers=loaders))
    assert [batch[:, 1].tolist() for batch in batches] == [[2, 2], [2, 2], [1]], "the length of each list"


class Records(Numbers):
    """Indices of any type."""

    def __getitem__(self, index: Any) -> Any:
        return f"record {index}"


@both
def test_indices_of_any_type(kind: Kind, loaders: int) -> None:
    loader = kind(Records(0), batch_size=2, sampler=["a", ("b", 2), 3], num_workers=loaders)
    assert list(loader) == [["record a", "record ('b', 2)"], ["record 3"]]


def halves() -> Dataset[Any]:
    return random_split(Numbers(8), [0.5, 0.5], generator=torch.Generator().manual_seed(1))[1]


@pytest.mark.parametrize(
    "dataset",
    [
        Subset(Numbers(8), [3, 5, 7]),
        ConcatDataset([Numbers(2), Numbers(3)]),
        StackDataset(Numbers(3), TensorDataset(torch.arange(3))),
        StackDataset(left=Numbers(3), right=Numbers(3)),
        TensorDataset(torch.arange(5), torch.arange(5.0)),
        halves(),
        [torch.tensor([1]), torch.tensor([2])],
    ],
    ids=["Subset", "ConcatDataset", "StackDataset", "named StackDataset", "TensorDataset", "random_split", "list"],
)
@both
def test_datasets_of_torch(kind: Kind, dataset: Any, loaders: int) -> None:
    batches = list(kind(dataset, batch_size=2, num_workers=loaders))
    expected = [
        torch.utils.data.default_collate([dataset[i] for i in range(start, min(start + 2, len(dataset)))])
        for start in range(0, len(dataset), 2)
    ]
    assert equal(batches, expected)


# Order


@both
def test_the_last_batch_is_smaller_or_left_out(kind: Kind, loaders: int) -> None:
    kept = kind(Numbers(7), batch_size=3, num_workers=loaders)
    dropped = kind(Numbers(7), batch_size=3, drop_last=True, num_workers=loaders)
    assert (len(kept), [len(batch) for batch in kept]) == (3, [3, 3, 1])
    assert (len(dropped), [len(batch) for batch in dropped]) == (2, [3, 3])


def test_the_length_follows_the_sampler(kind: Kind) -> None:
    assert len(kind(Numbers(7), batch_size=None)) == 7
    assert len(kind(Numbers(7), batch_size=2, sampler=range(5))) == 3
    assert len(kind(Numbers(7), batch_sampler=[[0], [1, 2]])) == 2
    growing = [1, 2, 3]
    loader = kind(growing, batch_size=2)
    growing += [4, 5]
    assert len(loader) == 3
    with pytest.raises(TypeError):
        len(kind(Numbers(7), sampler=iter([1])))


@both
def test_samplers_of_the_user(kind: Kind, loaders: int) -> None:
    assert firsts(kind(Numbers(9), sampler=[4, 4, 1], num_workers=loaders)) == [4, 4, 1]
    batches = kind(Numbers(9), batch_sampler=[(8, 0), [5]], num_workers=loaders)
    assert [batch[:, 0].tolist() for batch in batches] == [[8, 0], [5]]
    assert batches.batch_size is None


@both
def test_the_generator_of_the_loader_decides_the_order(kind: Kind, loaders: int) -> None:
    def orders(seed: int) -> list[list[int]]:
        generator = torch.Generator().manual_seed(seed)
        loader = kind(Numbers(20), shuffle=True, generator=generator, num_workers=loaders)
        return [firsts(loader), firsts(loader)]

    torch.manual_seed(1)
    before = torch.get_rng_state()
    first, second = orders(7)
    assert torch.equal(torch.get_rng_state(), before), "the global generator is not used"
    assert first != second
    assert [first, second] == orders(7)
    assert first != orders(8)[0]


def test_a_batch_sampler_that_shuffles_draws_from_the_global_generator(kind: Kind) -> None:
    loader = kind(Numbers(20), batch_sampler=BatchSampler(RandomSampler(range(20)), 4, drop_last=False))
    torch.manual_seed(3)
    first = firsts(loader)
    second = firsts(loader)
    torch.manual_seed(3)
    assert firsts(loader) == first != second


@both
def test_iterators_of_one_loader_do_not_disturb_each_other(kind: Kind, loaders: int) -> None:
    loader = kind(Numbers(8), batch_size=2, num_workers=loaders)
    one, two = iter(loader), iter(loader)
    start = firsts([next(one), next(one), next(two)])
    assert (start, firsts(one), firsts(two)) == ([0, 2, 0], [4, 6], [2, 4, 6])
    for iterator in (one, two):
        with pytest.raises(StopIteration):
            next(iterator)


@both
def test_an_iteration_that_is_left_early_does_not_change_the_next(kind: Kind, loaders: int) -> None:
    loader = kind(Numbers(8), batch_size=2, num_workers=loaders)
    for _ in loader:
        break
    assert firsts(loader) == [0, 2, 4, 6]
    assert len(iter(loader)) == 4


class Gated(Numbers):
    """Sample 0 waits for the gate; each other one is counted."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.gate = multiprocessing.Semaphore(0)
        self.others = multiprocessing.Semaphore(0)

    def __getitem__(self, index: int) -> Any:
        if index == 0:
            assert self.gate.acquire(timeout=60)
        else:
            self.others.release()
        return super().__getitem__(index)


def test_batches_out_of_order(kind: Kind) -> None:
    dataset = Gated(4)
    iterator = iter(kind(dataset, num_workers=2, in_order=False))
    first = next(iterator)  # while sample 0 waits
    dataset.gate.release()
    assert sorted(firsts([first, *iterator])) == [0, 1, 2, 3]


def test_batches_in_order(kind: Kind) -> None:
    dataset = Gated(4)
    iterator = iter(kind(dataset, num_workers=2))
    assert dataset.others.acquire(timeout=60), "another sample is loaded while sample 0 waits"
    dataset.gate.release()
    assert firsts(iterator) == [0, 1, 2, 3]


# Workers


class Whereabouts(Numbers):
    """Who loads a sample."""

    name = "unnamed"

    def __getitem__(self, index: int) -> Any:
        worker = get_worker_info()
        if worker is None:
            return [os.getpid(), -1, -1, self.name]
        assert worker.dataset is self
        return [os.getpid(), worker.id, worker.num_workers, self.name]


def name_dataset(number: int) -> None:
    worker = get_worker_info()
    assert worker is not None
    assert worker.id == number
    assert worker.seed == torch.initial_seed()
    with pytest.raises((RuntimeError, AttributeError)):  # by the version of torch
        worker.id = 7
    worker.dataset.name = f"of worker {number}"


def test_workers_know_themselves(kind: Kind) -> None:
    dataset = Whereabouts(40)
    samples = list(kind(dataset, batch_size=None, num_workers=2, worker_init_fn=name_dataset))
    for process, number, count, name in samples:
        assert process != os.getpid()
        assert (number in {0, 1}, count, name) == (True, 2, f"of worker {number}")
    assert get_worker_info() is None
    assert dataset.name == "unnamed", "workers have copies of the dataset"


def test_there_is_no_worker_in_the_training_process(kind: Kind) -> None:
    samples = list(kind(Whereabouts(2), batch_size=None, worker_init_fn=name_dataset))
    assert samples == [[os.getpid(), -1, -1, "unnamed"]] * 2


def test_persistent_workers_stay_and_keep_their_copy_of_the_dataset(kind: Kind) -> None:
    dataset = Whereabouts(6)
    loader = kind(dataset, batch_size=None, num_workers=1, persistent_workers=True)
    first = list(loader)
    dataset.name = "renamed"
    assert list(loader) == first


def test_other_workers_see_what_has_changed_in_the_dataset(kind: Kind) -> None:
    dataset = Whereabouts(1)
    loader = kind(dataset, batch_size=None, num_workers=1)
    first = next(iter(loader))
    dataset.name = "renamed"
    second = next(iter(loader))
    assert (first[3], second[3], first[0] != second[0]) == ("unnamed", "renamed", True)


@pytest.mark.long
@pytest.mark.long
@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
@pytest.mark.parametrize("by_name", [True, False], ids=["name", "object"])
def test_start_methods(kind: Kind, method: str, by_name: bool) -> None:
    context: Any = method if by_name else multiprocessing.get_context(method)
    loader = kind(Numbers(4), batch_size=2, num_workers=1, multiprocessing_context=context)
    assert loader.multiprocessing_context.get_start_method() == method
    assert firsts(loader) == [0, 2]


@pytest.mark.parametrize("prefetch", [1, 3])
def test_each_worker_loads_ahead_by_the_prefetch_factor(kind: Kind, prefetch: int) -> None:
    dataset = Gated(20)
    iterator = iter(kind(dataset, sampler=range(1, 20), num_workers=1, prefetch_factor=prefetch))
    next(iterator)
    for _ in range(1 + prefetch):  # the one that was yielded, and those ahead of it
        assert dataset.others.acquire(timeout=60)
    assert not dataset.others.acquire(timeout=0.2)


class Slow(Numbers):
    def __getitem__(self, index: int) -> Any:
        time.sleep(30)


@pytest.mark.long
@pytest.mark.long
def test_a_timeout(kind: Kind) -> None:
    error = failure(kind(Slow(2), num_workers=1, timeout=1))
    assert (isinstance(error, RuntimeError), str(error)) == (True, "DataLoader timed out after 1 seconds")
    if isinstance(error, LoaderTimeout):
        assert error.loader == 0
        assert "loader 0 is loading [0]" in error.hint


@pytest.mark.skipif(torch.accelerator.is_available(), reason="for machines without an accelerator")
@both
def test_pinning_without_an_accelerator_warns_and_does_nothing(kind: Kind, loaders: int) -> None:
    loader = kind(Numbers(2), pin_memory=True, num_workers=loaders)
    with pytest.warns(UserWarning, match="no accelerator is found"):
        batches = list(loader)
    assert not batches[0].is_pinned()


# Exceptions


class Unfortunate(Exception):
    """Of the user's."""


class WithCode(Exception):
    def __init__(self, code: int) -> None:
        super().__init__(f"code {code}")
        self.code = code


@pytest.mark.parametrize(
    ("error", "text"),
    [(Unfortunate("bad sample"), "Unfortunate: bad sample"), (WithCode(7), "WithCode: code 7")],
    ids=["own class", "own arguments"],
)
def test_an_exception_in_a_worker_arrives_with_type_and_traceback(kind: Kind, error: Exception, text: str) -> None:
    caught = failure(kind(Failing(4, 1, error), num_workers=1))
    assert type(caught) is type(error)
    assert text in str(caught)
    assert "in __getitem__" in str(caught)


def test_the_traceback_of_a_key_error_is_readable(kind: Kind) -> None:
    """A KeyError shows the repr of its text, where line ends would be backslashes."""
    caught = failure(kind(Failing(4, 1, KeyError("missing")), num_workers=1))
    assert isinstance(caught, KeyError)
    assert "\n  File " in str(caught)


@pytest.mark.long
@both
def test_stop_iteration_in_the_dataset(kind: Kind, loaders: int) -> None:
    iterator = iter(kind(Failing(4, 2, StopIteration()), num_workers=loaders))
    assert firsts(iterator) == [0, 1], "ends a for loop"
    del iterator
    gc.collect()  # torch's iterator is in a cycle with the exception, and would be closed in a later test, for 10 s


def test_an_exception_in_the_training_process_arrives_as_it_is(kind: Kind) -> None:
    error = WithCode(3)
    assert failure(kind(Failing(4, 1, error))) is error
