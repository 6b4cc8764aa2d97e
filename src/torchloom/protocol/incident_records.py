"""Records about incidents and the responses to them."""

from __future__ import annotations

from torchloom.protocol.ids import RankId, ReplicaId
from torchloom.protocol.job import EventKind, Response
from torchloom.protocol.message import Message, Part
from torchloom.protocol.node import Rollback
from torchloom.protocol.phrase import Prose


class About(Part, frozen=True):
    """What an incident is about. One of rank, run, job, device and node is set."""

    rank: RankId | None = None
    run: str = ""
    job: str = ""
    device: str = ""
    node: str = ""
    part: str = ""
    """Which part of it, where several may have an incident at once: a kind of trouble, a change, a node's agent."""


class IncidentOpened(Message, frozen=True):
    id: str
    what: Prose
    """One line: what went wrong."""
    about: About
    job: str = ""
    affected: tuple[ReplicaId, ...] = ()
    """The replicas on a device."""
    culprits: tuple[int, ...] = ()
    """Ranks that have the trouble; none if all wait and nobody stands out."""
    checkpoints: tuple[str, ...] = ()
    """Those that are damaged."""
    errors: tuple[str, ...] = ()
    """Which of them the evidence contains (SaveFailed.error)."""
    evidence: tuple[Prose, ...] = ()
    decision: Prose = ""
    reason: Prose = ""
    kind: str = ""
    """One of EventKind, where a policy may act on it."""


class IncidentAmended(Message, frozen=True):
    """More is known: evidence is added, a decision or an outcome is replaced."""

    id: str
    evidence: tuple[Prose, ...] = ()
    decision: Prose = ""
    reason: Prose = ""
    outcome: Prose = ""
    closed: bool = False
    culprits: tuple[int, ...] = ()
    """Further ranks that have the trouble."""
    stacks: str | None = None
    """The evidence is the stacks of ranks: the node whose agent took them, or empty if ranks told them themselves."""
    errors: tuple[str, ...] = ()
    """Further ones that the evidence contains."""


class ResponseBegan(Message, frozen=True):
    """What a policy does about an incident of a job, one thing after the other."""

    job: str
    incident: str
    kind: EventKind
    do: tuple[Response, ...]
    ranks: tuple[int, ...] = ()
    """Who is to blame."""
    reason: Prose = ""
    step: int = 0
    rollback: Rollback | None = None


class ResponseWent(Message, frozen=True):
    """So much of it is left to be done."""

    job: str
    left: tuple[Response, ...] = ()
