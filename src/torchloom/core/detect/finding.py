"""A condition that has begun, or is over."""

from __future__ import annotations

from typing import NamedTuple

from torchloom.protocol.job import EventKind
from torchloom.protocol.phrase import Prose


class Finding(NamedTuple):
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
