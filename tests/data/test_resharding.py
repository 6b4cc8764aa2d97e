"""An epoch continues with another number of ranks: each remaining index is used once."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DistributedSampler, SequentialSampler

from tests.data.samples import Numbers
from torchloom.data import ElasticLoader
from torchloom.data.resharding import Segment, Share, deal, remaining
from torchloom.errors import BadState


def loaders(ranks: int, total: int = 101, count: int = 0, size: int = 4) -> list[ElasticLoader]:
    made = []
    for rank in range(ranks):
        sampler: Any = DistributedSampler(Numbers(total), ranks, rank, seed=5)
        sampler.set_epoch(2)
        made.append(ElasticLoader(Numbers(total), batch_size=size, sampler=sampler, num_workers=count))
    return made


def indices(batches: list[Any]) -> list[int]:
    return [int(index) for batch in batches for index in batch[:, 0]]


@given(st.integers(0, 60), st.lists(st.tuples(st.integers(1, 5), st.integers(0, 5)), max_size=4), st.integers(1, 6))
def test_what_is_left_is_dealt_out_once(total: int, earlier: list[tuple[int, int]], ranks: int) -> None:
    everything = list(range(total))
    rest = remaining(everything, [Segment(*each) for each in earlier])
    used = sum(ranks * samples for ranks, samples in earlier)
    assert rest == everything[used:]
    shares = [deal(rest, Share(ranks, rank), drop_last=False) for rank in range(ranks)]
    assert len({len(share) for share in shares}) == 1, "ranks that train together make the same number of steps"
    together = [index for share in shares for index in share]
    assert set(together) == set(rest)
    assert len(together) < len(rest) + ranks
    exact = [index for rank in range(ranks) for index in deal(rest, Share(ranks, rank), drop_last=True)]
    assert len(exact) == len(set(exact)) == len(rest) // ranks * ranks


@pytest.mark.parametrize("count", [0, 1])
@pytest.mark.parametrize("numbers", [[3, 2], [2, 5], [4, 1, 3], [2, 3, 3, 2]])
def test_an_epoch_goes_on_with_other_numbers_of_ranks(numbers: list[int], count: int) -> None:
    used: list[int] = []
    state: Any = None
    for ranks in numbers:
        states = []
        for loader in loaders(ranks, count=count):
            if state is not None:
                loader.load_state_dict(state)
            iterator = iter(loader)
            used += indices([next(iterator), next(iterator)])
            states.append(loader.state_dict())
        state = loader.merge_rank_states(states)
    rest = []
    for loader in loaders(numbers[-1]):
        loader.load_state_dict(state)
        iterator = iter(loader)
        left = len(loader) - 2 * len(numbers)
        batches = list(iterator)
        assert len(batches) == left, "the length is that of this epoch, as it became"
        rest.append(indices(batches))
    assert len({len(each) for each in rest}) == 1
    used += [index for each in rest for index in each]
    assert set(used) == set(range(101))
    assert len(used) < 101 + numbers[-1], "only the padding of the end is used twice"


def test_the_batch_size_may_change_as_well() -> None:
    states = []
    used: list[int] = []
    for loader in loaders(2, total=80):
        iterator = iter(loader)
        used += indices([next(iterator)])
        states.append(loader.state_dict())
    for loader in loaders(3, total=80, size=7):
        loader.load_state_dict(loader.merge_rank_states(states))
        iterator = iter(loader)
        used += indices([next(iterator)])
        loader.change_batch_size(2)
        assert len(iterator) == 1 + 1 + 9, "as counted since the beginning: 24 left for each, 7 in a batch, 17 in nine"
        used += indices(list(iterator))
    assert sorted(used) == list(range(80))


def test_states_that_are_not_of_one_step_are_refused() -> None:
    first, second = loaders(2)
    next(iter(first))
    next(iter(second))
    ahead = {**second.state_dict(), "samples": 8}
    with pytest.raises(BadState, match="samples of the loader differed"):
        first.merge_rank_states([first.state_dict(), ahead])


def test_indices_that_are_not_shared_out_are_refused() -> None:
    loader = ElasticLoader(Numbers(20), batch_size=4, sampler=SequentialSampler(range(20)))
    next(iter(loader))
    with pytest.raises(BadState, match="DistributedSampler"):
        loader.merge_rank_states([loader.state_dict()] * 2)


def test_another_dataset_is_refused() -> None:
    (one, *_) = loaders(2, total=100)
    next(iter(one))
    with pytest.raises(BadState, match="100 indices"):
        loaders(3, total=90)[0].load_state_dict(one.state_dict())
