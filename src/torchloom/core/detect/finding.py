"""A condition that has begun, or is over."""

from __future__ import annotations

from typing import NamedTuple

from torchloom.messages import EventKind


class Finding(NamedTuple):
    kind: EventKind
    what: str
    """One line for people, without the name of the rank: "loss is NaN at step 1204"."""
    evidence: tuple[str, ...] = ()
    over: bool = False
    """The condition is gone; `what` says how it ended."""
    step: int = 0
    """At which it was seen, where that matters."""
    since: int | None = None
    """The first step at which it may have begun: beats are seconds apart, and steps may be shorter."""
