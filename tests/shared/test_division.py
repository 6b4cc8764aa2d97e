"""A total is divided over ranks without losing any of it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from torchloom.shared.division import share, shares_before


def test_a_remainder_goes_to_the_first_ranks() -> None:
    assert [share(17, 4, rank) for rank in range(4)] == [5, 4, 4, 4]


@given(st.integers(0, 10**6), st.integers(1, 100))
def test_the_parts_differ_by_one_at_most_and_are_the_total(total: int, ranks: int) -> None:
    parts = [share(total, ranks, rank) for rank in range(ranks)]
    assert sum(parts) == total
    assert max(parts) - min(parts) <= 1
    assert [shares_before(total, ranks, rank) for rank in range(ranks)] == [sum(parts[:rank]) for rank in range(ranks)]
