"""The conversation of a lighthouse with the weaver and the ranks."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from torchloom.protocol.ids import Incarnation, Name, Text
from torchloom.protocol.message import Message
from torchloom.protocol.phrase import Prose


class Evict(Message, frozen=True):
    """These are permanently gone: nobody waits for them, and every later message of theirs is refused."""

    term: int
    members: Annotated[tuple[Name, ...], Meta(max_length=1000)]
    reason: Prose = ""


class LighthouseBeat(Message, frozen=True):
    """What the lighthouse of a job has decided. Ranks hear it too: a quorum that lost a member never completes."""

    incarnation: Incarnation
    address: Text
    """Under which replicas reach it."""
    quorum: int = 0
    """The number of the last one."""
    members: Annotated[tuple[Name, ...], Meta(max_length=1000)] = ()
    """Of the last one, as long as they were not evicted."""
    waiting: Annotated[tuple[Name, ...], Meta(max_length=1000)] = ()
    """Have asked for the next one."""
    evicted: Annotated[tuple[Name, ...], Meta(max_length=1000)] = ()
    """The latest."""
    broken: Annotated[tuple[int, ...], Meta(max_length=100)] = ()
    """The latest quorums that lost a member."""
    stores: Annotated[dict[Name, Text], Meta(max_length=2000)] = {}
    """Where the ranks of each member meet, by which the replica is known that does not say its id itself."""
    min_replicas: Annotated[int, Meta(ge=1)] = 1
