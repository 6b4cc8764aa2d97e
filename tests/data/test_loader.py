"""The constructor and the attributes are those of torch's DataLoader."""

from __future__ import annotations

import copy
import inspect
import pickle
import subprocess
import sys
from typing import Any

import numpy
import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler

from tests.data.samples import Lines, Numbers, equal
from torchloom.data import ElasticLoader
from torchloom.errors import BadInput


def test_the_constructor_has_all_arguments_of_torch_with_their_defaults() -> None:
    theirs = inspect.signature(DataLoader.__init__).parameters
    ours = inspect.signature(ElasticLoader.__init__).parameters
    assert {name: (parameter.kind, parameter.default) for name, parameter in theirs.items()} == {
        name: (parameter.kind, parameter.default) for name, parameter in ours.items() if name in theirs
    }
    assert list(ours)[: len(theirs)] == list(theirs)
    assert set(ours) - set(theirs) == {"seeding", "kill_limit", "shards", "workers"}


def test_a_number_of_loaders_may_be_an_integer_of_numpy() -> None:
    loader = ElasticLoader(Numbers(4), num_workers=numpy.int64(2))
    assert (loader.num_workers, type(loader.num_workers)) == (2, int)
    loader.resize(numpy.int32(0))
    assert (loader.num_workers, type(loader.num_workers)) == (0, int)
    for wrong in (1.0, "1", None):
        with pytest.raises(BadInput, match="is not a whole number"):
            loader.resize(wrong)


@pytest.mark.parametrize(
    "arguments",
    [
        {"num_workers": -1},
        {"timeout": -1},
        {"prefetch_factor": 2},
        {"persistent_workers": True},
        {"shuffle": True, "sampler": [1]},
        {"batch_sampler": [[1]], "batch_size": 2},
        {"batch_size": None, "drop_last": True},
        {"multiprocessing_context": "fork"},
    ],
    ids=str,
)
def test_arguments_are_checked_by_torch(arguments: dict[str, Any]) -> None:
    with pytest.raises(ValueError) as theirs:
        DataLoader(Numbers(4), **arguments)
    with pytest.raises(ValueError) as ours:
        ElasticLoader(Numbers(4), **arguments)
    assert str(ours.value) == str(theirs.value)


def test_it_is_a_dataloader_with_its_attributes() -> None:
    dataset = Numbers(10)
    loader = ElasticLoader(dataset, batch_size=3, num_workers=2, drop_last=True)
    assert isinstance(loader, DataLoader)
    assert (len(loader), loader.dataset, loader.batch_size, loader.num_workers) == (3, dataset, 3, 2)
    assert (loader.prefetch_factor, loader.drop_last, len(iter(loader))) == (2, True, 3)
    assert isinstance(loader.sampler, SequentialSampler)


@pytest.mark.parametrize(
    "arguments",
    [
        {"batch_size": 3, "drop_last": True},
        {"batch_size": None},
        {"batch_sampler": BatchSampler(SequentialSampler(range(10)), 4, drop_last=False)},
        {"batch_size": 2, "num_workers": 1, "persistent_workers": True, "prefetch_factor": 3, "timeout": 60},
        {"batch_size": 2, "shuffle": True, "generator": torch.Generator()},
    ],
    ids=["size", "single", "batch_sampler", "workers", "shuffle"],
)
def test_from_a_dataloader(arguments: dict[str, Any]) -> None:
    theirs = DataLoader(Numbers(10), **arguments)
    ours = ElasticLoader.from_dataloader(theirs)
    names = ["batch_size", "num_workers", "drop_last", "prefetch_factor", "persistent_workers", "timeout", "generator"]
    assert [getattr(ours, name) for name in names] == [getattr(theirs, name) for name in names]
    for loader in (theirs, ours):
        if loader.generator is not None:
            loader.generator.manual_seed(2)
        torch.manual_seed(2)
        loader.epoch = list(loader)
    assert equal(theirs.epoch, ours.epoch)


def test_from_a_loader_that_iterates_in_its_own_way() -> None:
    class Other(DataLoader[Any]):
        def __iter__(self) -> Any:
            return iter(())

    with pytest.raises(BadInput):
        ElasticLoader.from_dataloader(Other(Numbers(3)))
    elastic = ElasticLoader(Numbers(3), batch_size=2)
    assert equal(list(ElasticLoader.from_dataloader(elastic)), list(elastic))
    sharded = ElasticLoader.from_dataloader(DataLoader(Lines(6), num_workers=1), shards=3, kill_limit=2)
    assert (sharded.shards, sharded.kill_limit) == (3, 2)
    patient = ElasticLoader.from_dataloader(ElasticLoader(Numbers(3), seeding="worker", kill_limit=9))
    assert (patient.seeding, patient.kill_limit) == ("worker", 9)
    with pytest.raises(BadInput, match="a list is not a DataLoader"):
        ElasticLoader.from_dataloader([])


def test_it_is_generic_as_torchs_is() -> None:
    def make() -> ElasticLoader[torch.Tensor]:
        return ElasticLoader[torch.Tensor](Numbers(3))

    assert type(make()) is ElasticLoader


@pytest.mark.parametrize("arguments", [{}, {"persistent_workers": True}, {"multiprocessing_context": "fork"}], ids=str)
def test_from_a_loader_that_has_no_processes_any_more(arguments: dict[str, Any]) -> None:
    loader = ElasticLoader(Numbers(8), batch_size=2, num_workers=2, prefetch_factor=3, **arguments)
    loader.resize(0)
    other = ElasticLoader.from_dataloader(loader)
    assert (other.num_workers, other.prefetch_factor) == (0, 3)
    assert equal(list(other), list(loader))
    other.resize(1)
    assert other.persistent_workers == loader.persistent_workers


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda loader: pickle.loads(pickle.dumps(loader))])
def test_a_copy_has_the_settings_and_the_position_and_processes_of_its_own(copied: Any, persistent: bool) -> None:
    generator = torch.Generator().manual_seed(4)
    loader = ElasticLoader(
        Numbers(12), 2, True, num_workers=1, persistent_workers=persistent, generator=generator, kill_limit=7
    )
    iterator = iter(loader)
    next(iterator)
    other = copied(loader)
    assert (other.batch_size, other.kill_limit, other.persistent_workers) == (2, 7, persistent)
    assert other.state_dict()["batches"] == 1
    other.load_state_dict(other.state_dict())
    assert equal(list(other), list(iterator)), "the rest of the epoch"
    other.resize(2)
    assert equal(list(other), list(loader)), "and the next one"


def test_options_of_its_own_are_checked() -> None:
    with pytest.raises(BadInput):
        ElasticLoader(Numbers(3), seeding="never")  # type: ignore[arg-type]
    with pytest.raises(BadInput):
        ElasticLoader(Numbers(3), kill_limit=0)


def test_an_iterator_of_persistent_loaders_ends_when_the_next_one_begins() -> None:
    loader = ElasticLoader(Numbers(40), batch_size=2, num_workers=1, persistent_workers=True)
    first = iter(loader)
    next(first)
    batches = list(loader)
    assert [int(batch[0, 0]) for batch in batches] == list(range(0, 40, 2)), "nothing of the first iteration"
    with pytest.raises(RuntimeError):
        next(first)


def test_importing_torchloom_does_not_import_it() -> None:
    script = "import sys, torchloom; print('torchloom.data' in sys.modules, 'torch' in sys.modules)"
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert ended.stdout.split() == ["False", "False"]


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy])
def test_a_copy_has_a_position_of_its_own(copied: Any) -> None:
    loader = ElasticLoader(Numbers(12), batch_size=2)
    next(iter(loader))
    loader.load_state_dict(loader.state_dict())
    other = copied(loader)
    assert (len(list(loader)), len(list(other))) == (5, 5)
