"""What a rank has that outlives a connection."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from torchloom.protocol.ids import RankId
from torchloom.protocol.lighthouse import LighthouseBeat
from torchloom.protocol.rank import Joined
from torchloom.threadlet.changes.orders import Orders
from torchloom.threadlet.changes.step_boundary import StepBoundary
from torchloom.threadlet.connection.outbox import Outbox
from torchloom.threadlet.metrics.liveness import LivenessPageWriter
from torchloom.threadlet.metrics.meter import Meter
from torchloom.threadlet.metrics.readings import Reader


@dataclass
class Membership:
    """The rank's replica under torchft. Written by the integration with torchft, read by the link thread."""

    joined: Joined | None = None
    """Reported after every hello; None if torchft does not provide the id of the replica."""
    hear: Callable[[LighthouseBeat], None] = lambda _: None
    """Called on the link thread with each beat of the job's lighthouse; must not block."""
    quorum: int | None = None
    participants: int | None = None
    discarded: int = 0
    begun: int = 0
    """Collective operations started in the current step: the rank with the fewest is the one that others wait for."""


@dataclass
class RankState:
    """One incarnation of a rank, kept from connection to connection."""

    rank: RankId
    incarnation: str
    beat_seconds: float
    meter: Meter
    boundary: StepBoundary
    orders: Orders
    liveness: LivenessPageWriter
    reader: Reader = field(default_factory=Reader)
    welcomed: bool = False
    term: int = 0
    """The highest term received; a weaver with a lower one was replaced."""
    hellos: int = 0
    ignored: int = 0
    """Commands that could not be decoded."""
    complained: bool = False
    """The user was warned that a value given to step() cannot be reported."""
    outbox: Outbox = field(default_factory=Outbox)
    member: Membership | None = None
    """None if the rank is not part of a torchft replica."""
