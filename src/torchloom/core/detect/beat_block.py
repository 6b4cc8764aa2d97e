"""Ordinary beats, column by column: what the detectors of a rank learn from several at once."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

CLOSED = (math.inf, -math.inf)
"""Between these nothing is: every beat must be examined."""


class Block(NamedTuple):
    """Some beats of one rank, the latest last. In each of them it made steps, and each was within all limits."""

    at: tuple[float, ...]
    """When they were heard."""
    steps: tuple[int, ...]
    """How many it made."""
    p50: tuple[float, ...]
    p99: tuple[float, ...]
    rate: tuple[float | None, ...]
    """Samples in a second."""
    rss_mb: tuple[float, ...]
    free_mb: tuple[float | None, ...]
    device_mb: tuple[float | None, ...]
    device_free_mb: tuple[float | None, ...]


def known(column: Sequence[float | None]) -> list[float]:
    return [value for value in column if value is not None]
