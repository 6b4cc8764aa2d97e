"""What a life of a rank carries from one connection to the next."""

from __future__ import annotations

from dataclasses import dataclass, field

from torchloom.messages import RankId
from torchloom.threadlet.membership import Membership
from torchloom.threadlet.outbox import Outbox


@dataclass
class Life:
    """What one life of a rank knows of itself, from connection to connection."""

    rank: RankId
    incarnation: str
    beat_seconds: float
    welcomed: bool = False
    term: int = 0
    """The highest term of a weaver heard of; a lower one was replaced."""
    hellos: int = 0
    ignored: int = 0
    """Commands that could not be understood."""
    complained: bool = False
    """The user was told that something given to step() cannot be reported."""
    outbox: Outbox = field(default_factory=Outbox)
    member: Membership | None = None
    """Of a torchft replica."""
