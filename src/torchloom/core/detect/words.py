"""How findings name ranks and times."""

from __future__ import annotations

from collections.abc import Iterable

MOST_RANGES = 12
"""Named one by one; of more, only how many."""


def ranks(numbers: Iterable[int]) -> str:
    """ "rank 3", "ranks 0-6, 9"; of very many pieces the first, and how many there are."""
    ordered = sorted(set(numbers))
    if not ordered:
        return "no rank"
    ranges: list[tuple[int, int]] = []
    for number in ordered:
        if ranges and number == ranges[-1][1] + 1:
            ranges[-1] = (ranges[-1][0], number)
        else:
            ranges.append((number, number))
    pieces = [str(low) if low == high else f"{low}-{high}" for low, high in ranges[:MOST_RANGES]]
    more = f" and others, {len(ordered)} in all" if len(ranges) > MOST_RANGES else ""
    return f"{'rank' if len(ordered) == 1 else 'ranks'} {', '.join(pieces)}{more}"


def seconds(value: float) -> str:
    """ "0.8 ms", "2.1 s", "35 min"."""
    if value < 1:
        return f"{value * 1000:.3g} ms"
    return f"{value:.3g} s" if value < 600 else f"{value / 60:.0f} min"
