"""Division of a total over ranks, such as samples of a batch or loader processes."""

from __future__ import annotations


def share(total: int, ranks: int, rank: int) -> int:
    """The part of one rank: as equal as possible. If there is a remainder, the first ranks get one more."""
    return total // ranks + (rank < total % ranks)


def shares_before(total: int, ranks: int, rank: int) -> int:
    """The sum of the parts of all ranks before one."""
    return total // ranks * rank + min(rank, total % ranks)
