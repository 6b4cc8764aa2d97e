"""Everything that the log contains. The state of the weaver is a fold of these records."""

from __future__ import annotations

from typing import Literal

import msgspec

from torchloom.protocol.ids import Incarnation, RankId, ReplicaId
from torchloom.protocol.incident_records import IncidentAmended, IncidentOpened, ResponseBegan, ResponseWent
from torchloom.protocol.knob_values import KnobSpec, Value
from torchloom.protocol.message import Message, Part
from torchloom.protocol.operator import RequestRecord
from torchloom.protocol.phrase import Prose
from torchloom.protocol.rank import ChangeSpec, Hello
from torchloom.protocol.run_records import (
    AttemptBegan,
    AttemptEnded,
    AttemptLaunched,
    AttemptPaused,
    AttemptRunning,
    AttemptStopping,
    RunEnded,
    RunSubmitted,
)


class TermBegan(Message, frozen=True):
    """A weaver took over. Every later record of an older term is refused by the server."""

    term: int
    weaver: str
    """host:pid of the process that took over."""


class JobBegan(Message, frozen=True):
    job: str


class JobEnded(Message, frozen=True):
    job: str
    outcome: str
    """finished, stopped or failed."""
    reason: Prose = ""


class JobForgotten(Message, frozen=True):
    """Ended long ago: dropped from the cluster state, still in the log until the log's own age limit."""

    job: str


class RankJoined(Message, frozen=True):
    rank: RankId
    hello: Hello


class RankAttached(Message, frozen=True):
    """Its script speaks for itself now; until then its steps were counted for it."""

    rank: RankId
    incarnation: Incarnation


class RankLost(Message, frozen=True):
    """Its link closed or it fell silent. It may come back; nothing is done yet."""

    rank: RankId
    incarnation: Incarnation
    reason: Prose
    patient: bool = False
    """The process may well be alive (frozen, network): wait longer before calling it dead."""


class RankFound(Message, frozen=True):
    rank: RankId
    incarnation: Incarnation
    reason: Prose


class RankDied(Message, frozen=True):
    rank: RankId
    incarnation: Incarnation
    reason: Prose
    confirmed: bool = False
    """Its end was seen or told; a presumed death can still turn out wrong."""


class RankLeft(Message, frozen=True):
    rank: RankId
    incarnation: Incarnation
    how: Literal["finished", "interrupted"]


class RankForgotten(Message, frozen=True):
    """Gone for long, and its job continues without it."""

    rank: RankId


class DeviceSeated(Message, frozen=True):
    """By hand: a device was registered for a replica. (A rank's own devices come with RankJoined.)"""

    device: str
    replica: ReplicaId
    node: str = ""
    operator: str = ""


class DeviceBlamed(Message, frozen=True):
    """A source reports that a device is broken; others may do so too, each for its own reason."""

    device: str
    by: str
    """An alert, a source, or `hand`."""
    cause: str
    began: float = 0.0
    alert: bool = False
    node: str = ""


class DeviceCleared(Message, frozen=True):
    """It does not report that any more."""

    device: str
    by: str


class DeviceMarkedFailed(Message, frozen=True):
    device: str
    cause: Prose
    source: str
    replicas: tuple[ReplicaId, ...] = ()


class DeviceMarkedRecovered(Message, frozen=True):
    device: str
    source: str


class KnobsOffered(Message, frozen=True):
    """What may be changed in a job, when that became more or other."""

    job: str
    knobs: tuple[KnobSpec, ...]
    checkpoints: bool = False


class ChangeProposed(Message, frozen=True):
    """A change is under way: its ranks have been, or are about to be, asked to take it at its step."""

    change: ChangeSpec
    job: str
    lives: tuple[tuple[RankId, Incarnation], ...]
    request: str
    operator: str = ""
    before: dict[str, Value] = {}
    replica: str | None = None
    rank: int | None = None
    reverts: str = ""


class Abort(Part, frozen=True):
    """Why a change is not made."""

    why: Literal["refused", "late", "joined", "gone", "silent", "overtaken"]
    """A rank refuses it; its step had passed there; a rank joined, left, or did not answer; a rank came to the step
    before the verdict did."""
    ranks: tuple[RankId, ...] = ()
    refusal: str = ""
    """What the rank says."""


class ChangeDecided(Message, frozen=True):
    """The verdict, as the server let it be written: all ranks take it at its step, or none does."""

    id: str
    commit: bool
    abort: Abort | None = None


class ChangeSettled(Message, frozen=True):
    """Every rank of the change has reported the outcome, or cannot any more."""

    id: str
    applied: int
    outcome: Prose
    failed: int = 0
    unknown: tuple[RankId, ...] = ()
    """Died in between: whether they took it is not known."""


class OrderGiven(Message, frozen=True):
    id: str
    request: str
    verb: str
    job: str
    lives: tuple[tuple[RankId, Incarnation], ...]
    operator: str = ""
    incident: str = ""
    """For which stacks are taken."""


class OrderEnded(Message, frozen=True):
    id: str
    outcome: Prose
    applied: int = 0
    ok: bool = True
    """Every rank it was for has done it."""


class CheckpointSaved(Message, frozen=True):
    """A checkpoint of the rank's job is on disk, whole and durable."""

    rank: RankId
    step: int
    folder: str
    node: str
    size: int
    seconds: float
    stall: float = 0.0


class CheckpointFailed(Message, frozen=True):
    """A checkpoint of the rank's job could not be written; the last good one is still there."""

    rank: RankId
    step: int
    folder: str
    why: str


class JobResumed(Message, frozen=True):
    """A rank continues from a checkpoint of its job."""

    rank: RankId
    step: int
    path: str
    rejected: dict[str, str] = {}
    """Newer ones that were not whole, and why."""


class MemberJoined(Message, frozen=True):
    """A life of a rank belongs to a torchft replica."""

    rank: RankId
    incarnation: Incarnation
    member: str
    lighthouse: str = ""
    version: str = ""
    devices: tuple[str, ...] = ()


class MemberRegrouped(Message, frozen=True):
    """A replica is in another quorum."""

    rank: RankId
    quorum: int
    step: int
    participants: int


class MemberHealed(Message, frozen=True):
    """A replica has taken over the state of a peer."""

    rank: RankId
    step: int
    source: str = ""
    seconds: float = 0.0


class MemberDiscarded(Message, frozen=True):
    """A replica did not commit some steps."""

    rank: RankId
    step: int
    count: int
    quorum: int
    why: str = ""


class MembersEvicted(Message, frozen=True):
    """Ended, or to be ended: the lighthouse of their job must exclude them."""

    job: str
    members: tuple[str, ...]
    reason: Prose = ""


class InboxRead(Message, frozen=True):
    """The durable inbox has been decided on up to here; a restarted weaver continues after it."""

    seq: int


Record = (
    TermBegan | JobBegan | JobEnded | JobForgotten | RankJoined | RankAttached | RankLost | RankFound | RankDied
    | RankLeft | RankForgotten | DeviceSeated | DeviceBlamed | DeviceCleared | DeviceMarkedFailed
    | DeviceMarkedRecovered | IncidentOpened | IncidentAmended | KnobsOffered | ChangeProposed | ChangeDecided
    | ChangeSettled | OrderGiven | OrderEnded | CheckpointSaved | CheckpointFailed | JobResumed | MemberJoined
    | MemberRegrouped | MemberHealed | MemberDiscarded | MembersEvicted | RunSubmitted | AttemptBegan
    | AttemptLaunched | AttemptRunning | AttemptPaused | AttemptStopping | ResponseBegan | ResponseWent | AttemptEnded
    | RunEnded | RequestRecord | InboxRead
)  # fmt: skip


def named_jobs(record: Record) -> frozenset[str]:
    """The jobs that a record names in its fields `job`, `rank`, `replica` and `replicas`."""
    ids = (getattr(record, "rank", None), getattr(record, "replica", None), *getattr(record, "replicas", ()))
    jobs = {id.job for id in ids if isinstance(id, RankId | ReplicaId)}
    return frozenset(jobs | {getattr(record, "job", "")} - {""})


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """One append to the log: what one weaver decided at one moment, all of it or nothing."""

    term: int
    at: float
    records: tuple[Record, ...]
    format: int = 1
    """Of the records (core/state/cluster.py). The first one was not written down."""
