"""What detectors share: what they learn from, and what they report."""

from __future__ import annotations

import math
from typing import NamedTuple, Protocol

from torchloom.protocol.job_spec import EventKind
from torchloom.protocol.phrase import Prose
from torchloom.protocol.rank import Beat, StepTimes

CLOSED = (math.inf, -math.inf)
"""Between these nothing is: every beat must be examined."""


class Finding(NamedTuple):
    """A condition that has begun, or is over."""

    kind: EventKind
    what: Prose
    """One line for people, without the name of the rank: "loss is NaN at step 1204"."""
    evidence: tuple[Prose, ...] = ()
    over: bool = False
    """The condition is gone; `what` says how it ended."""
    step: int = 0
    """At which it was seen, where that matters."""
    since: int | None = None
    """The first step at which it may have begun: beats are seconds apart, and steps may be shorter."""


class Block(NamedTuple):
    """Some ordinary beats of one rank, column by column, the latest last: what its detectors learn from at once.

    In each of them it made steps, and each was within all limits.
    """

    at: tuple[float, ...]
    """When they were heard."""
    p50: tuple[float, ...]
    p99: tuple[float, ...]
    loss: tuple[float | None, ...]
    rate: float | None
    """Samples in a second, at the last beat."""


class Detector(Protocol):
    """Learns from the beats of one rank. A rank that restarts gets a new one."""

    @property
    def due(self) -> bool:
        """It has a finding: the next beat must be examined. Asked after each block, so it must be cheap."""

    def learn(self, block: Block) -> None:
        """Take in ordinary beats."""

    def hear(self, beat: Beat, times: StepTimes, now: float) -> Finding | None:
        """Take in a beat that is examined."""
