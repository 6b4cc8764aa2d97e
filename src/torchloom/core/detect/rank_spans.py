"""Ranks by their numbers, in little room: thousands that wait are a few spans."""

from __future__ import annotations

from collections.abc import Iterable

MOST = 12
"""Spans that are listed; of more, how many ranks there are in all."""


def spans(numbers: Iterable[int]) -> tuple[tuple[int, int] | int, ...]:
    """The first and the last of each that follow one another: (0, 2), (5, 5) of 0, 1, 2 and 5.

    After the first dozen spans stands the number of all ranks instead of the others.
    """
    ordered = sorted(set(numbers))
    pairs: list[tuple[int, int]] = []
    for number in ordered:
        if pairs and number == pairs[-1][1] + 1:
            pairs[-1] = (pairs[-1][0], number)
        else:
            pairs.append((number, number))
    return (*pairs[:MOST], len(ordered)) if len(pairs) > MOST else tuple(pairs)
