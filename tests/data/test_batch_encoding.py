"""Batches as messages, and the memory that they are in."""

from __future__ import annotations

import gc
import os
import pickle
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from tests.data.samples import equal
from torchloom.data.loaders.batch_encoding import decode, encode
from torchloom.data.loaders.shared_memory import SPARE_SLOTS, SlotRing, SlotTable

LARGE = 100_000


def deliver(ring: SlotRing, table: SlotTable) -> None:
    """What the packet about slots does."""
    table.add([entry[:2] for entry in ring.announced], [os.dup(entry[2]) for entry in ring.announced])
    table.retire(ring.retired)
    for entry in ring.announced:
        os.close(entry[2])
    ring.announced, ring.retired = [], []


def pass_through(batch: object, ring: SlotRing, table: SlotTable) -> object:
    message = bytes(encode(batch, ring))
    deliver(ring, table)
    return decode(message, table)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(5),
        torch.empty(0, 3),
        torch.tensor(7.0),
        torch.rand(3, 4).t(),
        torch.rand(LARGE),
        torch.rand(2, 3, 100, 100).to(memory_format=torch.channels_last),
        torch.rand(4, 4, dtype=torch.complex64),
        torch.rand(4, 4, dtype=torch.complex64).conj(),
        torch.rand(LARGE).to(torch.bfloat16),
        torch.zeros(LARGE, dtype=torch.bool),
        torch.eye(4).to_sparse(),
        torch.nn.Parameter(torch.rand(3)),
    ],
    ids=lambda tensor: f"{tensor.dtype}{tuple(tensor.shape)}",
)
def test_tensors_arrive_as_they_were(tensor: torch.Tensor) -> None:
    arrival = pass_through({"tensor": tensor}, SlotRing(), SlotTable())
    assert isinstance(arrival, dict)
    arrived = arrival["tensor"]
    assert type(arrived) is type(tensor)
    assert arrived.requires_grad == tensor.requires_grad
    if tensor.is_sparse:
        arrived, tensor = arrived.to_dense(), tensor.to_dense()
    assert equal(arrived.detach(), tensor.detach())


def test_tensors_on_one_storage_of_the_ring_share_memory_at_the_other_side() -> None:
    ring, table = SlotRing(), SlotTable()
    whole = torch.empty(0).set_(ring.new_shared(4 * LARGE), 0, (LARGE,), (1,))
    arrival = pass_through([whole, whole[LARGE // 2 :]], ring, table)
    assert isinstance(arrival, list)
    arrival[0].fill_(5)
    assert torch.equal(arrival[1], torch.full((LARGE // 2,), 5.0))


def test_memory_comes_back_once_when_the_last_view_has_gone() -> None:
    ring, table = SlotRing(), SlotTable()
    arrival = pass_through([torch.rand(LARGE), torch.rand(LARGE)], ring, table)
    assert isinstance(arrival, list)
    view = arrival[0][3:].numpy()
    del arrival
    gc.collect()
    assert table.returned() == ([1], [])
    del view
    gc.collect()
    assert (table.returned(), table.returned()) == (([0], []), ([], []))


def test_returned_memory_is_used_for_the_next_batch() -> None:
    ring, table = SlotRing(), SlotTable()
    for number in range(20):
        arrival = pass_through(torch.full((LARGE - number,), float(number)), ring, table)
        assert isinstance(arrival, torch.Tensor)
        assert bool((arrival == number).all())
        del arrival
        ring.take_back(*table.returned())
    assert ring._created == 1


def test_a_batch_that_cannot_be_pickled_keeps_no_memory() -> None:
    ring = SlotRing()
    for _ in range(5):
        with pytest.raises((pickle.PicklingError, AttributeError)):
            encode([torch.rand(LARGE), lambda: None], ring)
    assert ring._created == 1
    deliver(ring, SlotTable())


def test_memory_is_given_back_if_there_is_more_than_needed() -> None:
    ring, table = SlotRing(), SlotTable()
    kept = [pass_through(torch.rand(LARGE), ring, table) for _ in range(3 * SPARE_SLOTS)]
    del kept
    ring.take_back(*table.returned())
    assert len(ring._slots) == SPARE_SLOTS
    deliver(ring, table)
    assert len(table._slots) == SPARE_SLOTS


def test_memory_that_is_too_small_is_replaced() -> None:
    ring, table = SlotRing(), SlotTable()
    for size in (LARGE, 2 * LARGE, 4 * LARGE, 8 * LARGE, 16 * LARGE, 32 * LARGE, 64 * LARGE):
        arrival = pass_through(torch.full((size,), 1.0), ring, table)
        assert isinstance(arrival, torch.Tensor)
        del arrival
        ring.take_back(*table.returned())
    assert len(ring._slots) <= SPARE_SLOTS // 2 + 1


class Unreadable:
    """It can be pickled, and fails when it is unpickled."""

    def __reduce__(self) -> tuple[object, ...]:
        return int, ("no number",)


def test_a_batch_that_cannot_be_unpickled_returns_all_its_memory() -> None:
    ring, table = SlotRing(), SlotTable()
    for _ in range(5):
        with pytest.raises(ValueError):
            pass_through([torch.rand(LARGE), Unreadable(), torch.rand(LARGE)], ring, table)
        ring.take_back(*table.returned())
    assert ring._created == 2


def test_a_part_and_the_whole_of_a_storage_arrive_in_any_order() -> None:
    ring, table = SlotRing(), SlotTable()
    whole = torch.empty(0).set_(ring.new_shared(4 * LARGE), 0, (LARGE,), (1,)).fill_(3)
    part = torch.from_numpy(whole.numpy()[: LARGE // 2])
    arrival = pass_through([part, whole], ring, table)
    assert equal(arrival, [part, whole])


def test_threads_allocate_at_the_same_time() -> None:
    ring = SlotRing()

    def allocate(owner: int) -> int:
        changed = 0
        kept: list[torch.Tensor] = []
        for number in range(1000):
            kept.append(torch.empty(0).set_(ring.new_shared(4 * 10_000), 0, (10_000,), (1,)).fill_(owner))
            changed += not all(bool((tensor == owner).all()) for tensor in kept)
            del kept[: number % 3]
        return changed

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(8) as pool:
            assert sum(pool.map(allocate, range(8))) == 0
    finally:
        sys.setswitchinterval(interval)
    ring.take_back([])
    assert len(ring._slots) <= SPARE_SLOTS
    deliver(ring, SlotTable())


def test_the_end_of_a_storage_never_waits_for_a_lock() -> None:
    ring = SlotRing()
    storage = [ring.new_shared(LARGE)]
    with ring.lock:
        dropping = threading.Thread(target=storage.clear, daemon=True)
        dropping.start()
        dropping.join(30)
        assert not dropping.is_alive()
    deliver(ring, SlotTable())
