"""Few file descriptors, little address space: an error that names it, and no batch is lost."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.data.samples import Numbers
from torchloom.data import ElasticLoader
from torchloom.data.loaders import transport
from torchloom.data.loaders.shared_memory import SlotRing
from torchloom.errors import LoaderShortage


class Many(Numbers):
    """Sample i is many large tensors, which are larger than those of sample i - 1."""

    def __init__(self, size: int, tensors: int, growth: int) -> None:
        super().__init__(size)
        self.tensors = tensors
        self.growth = growth

    def __getitem__(self, index: int) -> Any:
        return [torch.full((10_000 + index * self.growth,), float(index)) for _ in range(self.tensors)]


class Indices(Numbers):
    def __getitems__(self, indices: list[int]) -> int:
        return indices[0]


def unchanged(batch: Any) -> Any:
    return batch


@contextmanager
def limited(what: int, limit: int) -> Iterator[None]:
    before = resource.getrlimit(what)
    resource.setrlimit(what, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(what, before)


def descriptors(more: int) -> int:
    """A limit that leaves this number of descriptors."""
    return max(int(path.name) for path in Path("/proc/self/fd").iterdir()) + more


def value(batch: list[torch.Tensor]) -> float:
    (found,) = {float(tensor.mean()) for tensor in batch}
    return found


@contextmanager
def no_descriptor_left(but: int) -> Iterator[None]:
    files = []
    try:
        while True:
            files.append(os.open("/dev/null", os.O_RDONLY))
    except OSError:
        for _ in range(but):
            os.close(files.pop())
    try:
        yield
    finally:
        for file in files:
            os.close(file)


@pytest.mark.parametrize("left", [0, 1, 4])
def test_when_training_has_no_descriptor_for_a_batch_it_is_received_later(left: int) -> None:
    with limited(resource.RLIMIT_NOFILE, descriptors(64)):
        iterator = iter(ElasticLoader(Many(12, 12, 5000), batch_size=None, num_workers=2, collate_fn=unchanged))
        values = [value(next(iterator))]
        with no_descriptor_left(left):
            for _ in range(12):
                with pytest.raises(LoaderShortage):
                    values.extend(map(value, iterator))
        values += map(value, iterator)
    assert values == list(range(12))


def test_when_training_has_no_descriptor_for_a_large_message_it_is_sent_later() -> None:
    indices = [list(range(number, number + 40_000)) for number in range(8)]
    with limited(resource.RLIMIT_NOFILE, descriptors(64)):
        loader = ElasticLoader(
            Indices(50_000), batch_sampler=indices, num_workers=1, prefetch_factor=1, collate_fn=unchanged
        )
        iterator = iter(loader)
        values = [next(iterator)]
        with no_descriptor_left(0), pytest.raises(LoaderShortage):
            values.extend(iterator)
        values += iterator
    assert values == list(range(8))


def test_when_training_has_no_descriptor_for_a_loader_it_is_started_later() -> None:
    with limited(resource.RLIMIT_NOFILE, descriptors(64)):
        loader = ElasticLoader(Numbers(20), batch_size=1, num_workers=1)
        iterator = iter(loader)
        values = [int(next(iterator)[0, 0])]
        loader.resize(0)
        while iterator.loaders:
            values.append(int(next(iterator)[0, 0]))
        with no_descriptor_left(0):
            loader.resize(2)
            with pytest.raises(LoaderShortage):
                next(iterator)
        values += [int(batch[0, 0]) for batch in iterator]
    assert values == list(range(20))


def test_a_batch_may_have_more_tensors_than_a_process_descriptors() -> None:
    with limited(resource.RLIMIT_NOFILE, descriptors(40)):
        loader = ElasticLoader(Many(6, 100, 0), batch_size=None, num_workers=2, collate_fn=unchanged)
        assert [value(batch) for batch in loader] == list(range(6))


def test_large_memory_is_not_much_larger_than_needed() -> None:
    ring = SlotRing()
    for size in (33 << 20, 240_000_000):
        assert size <= ring.allocate(size).capacity <= size * 9 // 8
    for _, _, descriptor in ring.announced:
        os.close(descriptor)


def test_free_memory_makes_room_when_addresses_are_short() -> None:
    ring = SlotRing()
    ring.new_shared(200 << 20)
    ring.take_back([])
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    with limited(resource.RLIMIT_AS, used + (300 << 20)):
        assert ring.allocate(400 << 20).capacity >= 400 << 20
    for _, _, descriptor in ring.announced:
        os.close(descriptor)


def test_no_descriptor_when_loaders_are_to_start() -> None:
    loader = ElasticLoader(Numbers(8), batch_size=2, num_workers=2)
    files: list[int] = []
    with limited(resource.RLIMIT_NOFILE, descriptors(2)):
        with contextlib.suppress(OSError):
            while True:
                files.append(os.open(os.devnull, os.O_RDONLY))
        try:
            with pytest.raises(LoaderShortage):
                iter(loader)
        finally:
            for file in files:
                os.close(file)
    assert len(list(loader)) == 4


@pytest.mark.filterwarnings("error")
def test_a_zygote_without_a_descriptor_tries_again(monkeypatch: pytest.MonkeyPatch) -> None:
    original, training, tried = transport.Receiver.receive, os.getpid(), []

    def receive(self: Any, **arguments: Any) -> Any:
        if os.getpid() != training and len(tried) < 3:
            tried.append(1)
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return original(self, **arguments)

    monkeypatch.setattr(transport.Receiver, "receive", receive)
    assert len(list(ElasticLoader(Numbers(8), batch_size=2, num_workers=1))) == 4
