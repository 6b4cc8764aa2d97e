"""Ordinary beats, column by column: what the detectors of a rank learn from several at once."""

from __future__ import annotations

import math
from typing import NamedTuple

CLOSED = (math.inf, -math.inf)
"""Between these nothing is: every beat must be examined."""


class Block(NamedTuple):
    """Some beats of one rank, the latest last. In each of them it made steps, and each was within all limits."""

    at: tuple[float, ...]
    """When they were heard."""
    p50: tuple[float, ...]
    p99: tuple[float, ...]
    rss_mb: tuple[float, ...]
    device_mb: tuple[float | None, ...]
    loss: tuple[float | None, ...]
    rate: float | None
    """Samples in a second. This and the following are those of the last beat."""
    free_mb: float | None
    device_free_mb: float | None
