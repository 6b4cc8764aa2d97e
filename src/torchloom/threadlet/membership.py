"""What a rank of a torchft replica tells of its replica, besides what every rank tells, and what it hears."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torchloom.messages import Joined, LighthouseBeat


@dataclass
class Membership:
    """Written by the integration with torchft, read by the link."""

    joined: Joined | None = None
    """Said with every hello; None where torchft does not tell the id."""
    hear: Callable[[LighthouseBeat], None] = lambda _: None
    """Called with what the lighthouse of the job has decided, on the link's thread; never waits."""
    quorum: int | None = None
    participants: int | None = None
    discarded: int = 0
    begun: int = 0
    """What it has begun of its next step together with others: who has begun less is the one they wait for."""
