"""Queries: requests to see something, which change nothing."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from torchloom.protocol.ids import Name, RankNumber
from torchloom.protocol.message import Message


class QueryCluster(Message, frozen=True):
    """A picture of everything, ranks in pages."""

    job: Name | None = None
    offset: Annotated[int, Meta(ge=0)] = 0
    limit: Annotated[int, Meta(ge=0, le=1000)] = 1000
    readings: bool = False
    """With what devices say of themselves; the pages must be smaller then, to fit a message."""
    incident: Name | None = None
    """Of incidents this one alone, with all that is known of it; otherwise old ones are shortened."""


class QueryCurves(Message, frozen=True):
    """The downsampled history of each rank of a job."""

    job: Name
    replica: Name | None = None
    offset: Annotated[int, Meta(ge=0)] = 0
    limit: Annotated[int, Meta(ge=1, le=100)] = 100


class QueryKnobs(Message, frozen=True):
    """The knobs of a job and the changes made to them."""

    job: Name


class QueryRuns(Message, frozen=True):
    """The jobs that torchLoom starts itself, or one of them, and the nodes that agents run on."""

    job: Name | None = None


class QueryLines(Message, frozen=True):
    """What a rank printed. Asked of the agent on its node."""

    job: Name
    rank: RankNumber = 0
    which: Literal["out", "err"] = "out"
    ordinal: int | None = None
    """Of which attempt; the last one, if none is named."""
    submitted: float | None = None
    """Of the run that was submitted then; of the last one that was started there, if none is named."""
    at: Annotated[int, Meta(ge=0)] = 0
    """From which byte on."""
    most: Annotated[int, Meta(ge=1, le=512 * 1024)] = 256 * 1024


class QueryNodeChecks(Message, frozen=True):
    """Is a node fit for ranks? Asked of its agent, which looks now."""

    folder: Annotated[str, Meta(max_length=4096)] = ""
    """Where checkpoints will be written."""


class QueryBandwidth(Message, frozen=True):
    """How fast is the network to a peer that is asked the same? Asked of both agents."""

    host: Annotated[str, Meta(max_length=255)]
    port: Annotated[int, Meta(ge=1, le=65_535)]
    rank: Annotated[int, Meta(ge=0, le=1)]


NodeLook = QueryNodeChecks | QueryBandwidth


class QueryCheckpoints(Message, frozen=True):
    """The checkpoints that a job has reported."""

    job: Name


Look = QueryCluster | QueryCurves | QueryKnobs | QueryCheckpoints | QueryRuns
