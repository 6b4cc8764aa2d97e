"""The dataset of the built-in script: the same bytes for an index everywhere, and each index of an epoch used once."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from torchloom.workloads.synthetic_images import BatchShares, SyntheticImages


def test_a_sample_depends_only_on_its_index() -> None:
    images, others = (SyntheticImages(8, pixels=16, classes=10) for _ in range(2))
    torch.manual_seed(5)
    first, label = images[3]
    again, same = others[3]
    assert torch.equal(first, again)
    assert label == same
    assert not torch.equal(first, images[4][0])
    assert (first.shape, first.dtype) == ((3, 16, 16), torch.float32)


@given(
    steps=st.integers(1, 12),
    batch=st.integers(1, 20),
    ranks=st.integers(1, 5),
    epochs=st.integers(1, 3),
    seed=st.integers(0, 100),
)
def test_the_ranks_use_each_index_of_an_epoch_once(steps: int, batch: int, ranks: int, epochs: int, seed: int) -> None:
    shares = [BatchShares(steps * epochs, steps, batch, rank=rank, ranks=ranks, seed=seed) for rank in range(ranks)]
    indices = [list(each) for each in shares]
    assert [len(each) for each in indices] == [len(each) for each in shares]
    for epoch in range(epochs):
        of_epoch = [
            index
            for share, each in zip(shares, indices, strict=True)
            for index in each[epoch * steps * share.size : (epoch + 1) * steps * share.size]
        ]
        assert sorted(of_epoch) == list(range(steps * batch))


def test_a_step_has_the_same_indices_for_any_number_of_ranks() -> None:
    (alone,) = (list(BatchShares(6, 3, 7)),)
    three = [BatchShares(6, 3, 7, rank=rank, ranks=3) for rank in range(3)]
    together = [iter(each) for each in three]
    for step in range(6):
        joined = [next(indices) for each, indices in zip(three, together, strict=True) for _ in range(each.size)]
        assert joined == alone[step * 7 : step * 7 + 7]


def test_a_job_may_begin_within_its_first_epoch() -> None:
    whole, rest = list(BatchShares(10, 5, 4)), list(BatchShares(8, 5, 4, first_step=2))
    assert rest == whole[8:]


def test_epochs_have_orders_of_their_own() -> None:
    indices = list(BatchShares(20, 10, 8))
    assert indices[:80] != indices[80:]
    assert indices[:80] != sorted(indices[:80])
