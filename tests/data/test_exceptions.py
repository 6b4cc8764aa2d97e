"""What the user's code raises in a loader arrives in training with its type and traceback, as from torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.data.samples import Failing, Numbers
from torchloom.data import ElasticLoader
from torchloom.errors import LoaderTimeout


def caught(dataset: Any, **arguments: Any) -> tuple[type[BaseException], int, str]:
    """The exception, and after how many batches."""
    count = 0
    try:
        for _ in ElasticLoader(dataset, batch_size=2, **arguments):
            count += 1
    except Exception as error:  # noqa: BLE001
        return type(error), count, str(error)
    raise AssertionError("no exception")


class OfTwoArguments(Exception):
    def __init__(self, first: str, second: str) -> None:
        super().__init__(first, second)


@pytest.mark.parametrize("loaders", [0, 2])
@pytest.mark.parametrize(
    ("error", "as_torch"),
    [(ValueError("no sample"), ValueError), (KeyError("key"), KeyError), (OfTwoArguments("a", "b"), RuntimeError)],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_in_the_dataset(error: Exception, as_torch: type[Exception], loaders: int) -> None:
    kind, count, text = caught(Failing(20, at=7, error=error), num_workers=loaders)
    assert (kind, count) == (as_torch if loaders else type(error), 3)
    assert loaders == 0 or ("in __getitem__" in text and f"Caught {type(error).__name__} in DataLoader" in text)


def test_the_batches_after_it_follow() -> None:
    iterator = iter(ElasticLoader(Failing(8, at=2, error=ValueError()), batch_size=2, num_workers=2))
    next(iterator)
    with pytest.raises(ValueError):
        next(iterator)
    assert [int(batch[0, 0]) for batch in iterator] == [4, 6]


def fail(*_: Any) -> None:
    raise OSError("prepared badly")


@pytest.mark.parametrize("where", ["collate_fn", "worker_init_fn"])
def test_in_collate_and_in_the_preparation_of_a_loader(where: str) -> None:
    kind, count, text = caught(Numbers(8), num_workers=2, **{where: fail})
    assert (kind, count) == (OSError, 0)
    assert "in fail" in text


def test_a_class_that_cannot_be_pickled() -> None:
    class Local(Exception):
        pass

    kind, _, text = caught(Failing(8, at=0, error=Local("unknown elsewhere")), num_workers=1)
    assert kind is RuntimeError
    assert "unknown elsewhere" in text


def collate_function(samples: list[Any]) -> Any:
    return lambda: samples


def collate_history(samples: list[Any]) -> Any:
    return torch.stack(samples).float().requires_grad_() * 2


def test_batches_that_cannot_be_sent() -> None:
    kind, count, _ = caught(Numbers(8), num_workers=1, collate_fn=collate_function)
    assert (issubclass(kind, Exception), count) == (True, 0)
    kind, count, text = caught(Numbers(8), num_workers=1, collate_fn=collate_history)
    assert (kind, count) == (RuntimeError, 0)
    assert "detach" in text


class Unreadable:
    def __reduce__(self) -> Any:
        return fail, ()


def collate_unreadable(samples: list[Any]) -> Any:
    return Unreadable()


def test_batches_that_cannot_be_received() -> None:
    assert caught(Numbers(8), num_workers=1, collate_fn=collate_unreadable)[:2] == (OSError, 0)


class Endless(Numbers):
    def __getitem__(self, index: int) -> Any:
        while index == 2:
            pass
        return super().__getitem__(index)


@pytest.mark.long
def test_a_timeout() -> None:
    iterator = iter(ElasticLoader(Endless(8), batch_size=2, num_workers=1, timeout=0.5))
    next(iterator)
    with pytest.raises(LoaderTimeout) as information:
        next(iterator)
    assert isinstance(information.value, RuntimeError)


def test_an_error_of_the_sampler() -> None:
    class Broken:
        def __iter__(self) -> Any:
            yield from [0, 1]
            raise ZeroDivisionError

    iterator = iter(ElasticLoader(Numbers(8), batch_size=2, sampler=Broken(), num_workers=1))
    next(iterator)
    with pytest.raises(ZeroDivisionError):
        next(iterator)
