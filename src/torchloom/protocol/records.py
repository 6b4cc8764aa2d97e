"""Everything that the log contains. The state of the weaver is a fold of these records.

Records of runs are in run_records.py, those that only a request leaves in operator.py, and those that only a report of
a rank leaves in rank.py.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from torchloom.protocol.ids import Incarnation, RankId, ReplicaId
from torchloom.protocol.message import Message, Part
from torchloom.protocol.operator import RequestRecord
from torchloom.protocol.phrase import Prose
from torchloom.protocol.rank import ChangeSpec, Hello, KnobSpec, ReportRecord, Value
from torchloom.protocol.run_records import RunRecord
from torchloom.protocol.scheduling import LoadersAllocated


class TermBegan(Message, frozen=True):
    """A weaver took over. Every later record of an older term is refused by the server."""

    term: int
    weaver: str
    """host:pid of the process that took over."""


class InboxRead(Message, frozen=True):
    """The durable inbox has been decided on up to here; a restarted weaver continues after it."""

    seq: int


class JobBegan(Message, frozen=True):
    job: str


class JobEnded(Message, frozen=True):
    job: str
    outcome: str
    """finished, stopped or failed."""
    reason: Prose = ""
    step: int | None = None
    loss: float | None = None
    """The last that its ranks reported."""


class JobForgotten(Message, frozen=True):
    """Ended long ago: dropped from the cluster state, still in the log until the log's own age limit."""

    job: str


class RankJoined(Message, frozen=True):
    rank: RankId
    hello: Hello


class LifeRecord(Message, frozen=True):
    """Base of the records about a life of a rank."""

    rank: RankId
    incarnation: Incarnation


class RankAttached(LifeRecord, frozen=True):
    """Its script speaks for itself now; until then its steps were counted for it."""


class RankLost(LifeRecord, frozen=True):
    """Its link closed or it fell silent. It may come back; nothing is done yet."""

    reason: Prose
    patient: bool = False
    """The process may well be alive (frozen, network): wait longer before calling it dead."""


class RankFound(LifeRecord, frozen=True):
    reason: Prose


class RankDied(LifeRecord, frozen=True):
    reason: Prose
    confirmed: bool = False
    """Its end was seen or told; a presumed death can still turn out wrong."""


class RankLeft(LifeRecord, frozen=True):
    how: Literal["finished", "interrupted"]


class RankForgotten(Message, frozen=True):
    """Gone for long, and its job continues without it."""

    rank: RankId


RankRecord = RankJoined | RankAttached | RankLost | RankFound | RankDied | RankLeft | RankForgotten


class DeviceRegistered(Message, frozen=True):
    """By hand: a device was registered for a replica. (A rank's own devices come with RankJoined.)"""

    device: str
    replica: ReplicaId
    node: str = ""
    operator: str = ""


class Blame(Part, frozen=True):
    """A source reports that a device has failed."""

    by: str
    """An alert, a source, or `hand`."""
    cause: Prose
    began: float = 0.0
    alert: bool = False
    """An alert, which its source repeats while it lasts."""
    overruled: bool = False
    """An operator has reported since that the device works."""


class DeviceBlamed(Message, frozen=True):
    """A source reports that a device is broken; others may do so too, each for its own reason."""

    device: str
    blame: Blame
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


DeviceRecord = DeviceRegistered | DeviceBlamed | DeviceCleared | DeviceMarkedFailed | DeviceMarkedRecovered


class About(Part, frozen=True):
    """What an incident is about. One of rank, run, job, device and node is set."""

    rank: RankId | None = None
    run: str = ""
    job: str = ""
    device: str = ""
    node: str = ""
    part: str = ""
    """Which part of it, where several may have an incident at once: a kind of trouble, a change, a node's agent."""


class IncidentRecord(Message, frozen=True):
    """Base of the records about an incident."""

    id: str
    culprits: tuple[int, ...] = ()
    """Ranks that have the trouble; none if all wait and nobody stands out."""
    errors: tuple[str, ...] = ()
    """Those that the evidence contains (SaveFailed.error)."""
    evidence: tuple[Prose, ...] = ()
    decision: Prose = ""
    reason: Prose = ""


class IncidentOpened(IncidentRecord, frozen=True, kw_only=True):
    what: Prose
    """One line: what went wrong."""
    about: About
    job: str = ""
    affected: tuple[ReplicaId, ...] = ()
    """The replicas on a device."""
    checkpoints: tuple[str, ...] = ()
    """Those that are damaged."""
    kind: str = ""
    """One of EventKind, where a policy may act on it."""


class IncidentAmended(IncidentRecord, frozen=True):
    """More is known: culprits, errors and evidence are added, a decision or an outcome is replaced."""

    outcome: Prose = ""
    closed: bool = False
    stacks: str | None = None
    """The evidence is the stacks of ranks: the node whose agent took them, or empty if ranks told them themselves."""


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
    """The ranks it is for, each with its incarnation."""
    request: str
    operator: str = ""
    before: dict[str, Value] = {}
    replica: str | None = None
    rank: int | None = None
    reverts: str = ""

    @property
    def target(self) -> str:
        """JOB, JOB/REPLICA or JOB/REPLICA/RANK."""
        return "/".join(str(part) for part in (self.job, self.replica, self.rank) if part is not None)


class Abort(Part, frozen=True):
    """Why a change is not made."""

    why: Literal["refused", "late", "joined", "gone", "silent", "overtaken", "unequal"]
    """A rank refuses it; its step had passed there; a rank joined, left, or did not answer; a rank came to the step
    before the verdict did; the loaders of ranks that train together are at different places."""
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
    pending: bool = False
    """Of a checkpoint: it is still being written, and is reported when it is complete."""


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
    """The number of ranks that confirmed; one that is gone may have obeyed without a reply, or never received it."""
    ok: bool = True
    """Every rank it was for has done it."""


ChangeRecord = KnobsOffered | ChangeProposed | ChangeDecided | ChangeSettled | OrderGiven | OrderEnded


class MembersEvicted(Message, frozen=True):
    """Ended, or to be ended: the lighthouse of their job must exclude them."""

    job: str
    members: tuple[str, ...]
    reason: Prose = ""


Record = (
    TermBegan | InboxRead | JobBegan | JobEnded | JobForgotten | IncidentOpened | IncidentAmended | MembersEvicted
    | RankRecord | DeviceRecord | ChangeRecord | ReportRecord | RunRecord | RequestRecord | LoadersAllocated
)  # fmt: skip


def named_jobs(record: Record) -> frozenset[str]:
    """The jobs that a record names in its fields `job`, `rank`, `replica`, `replicas` and `moves`."""
    ids = (getattr(record, "rank", None), getattr(record, "replica", None), *getattr(record, "replicas", ()))
    jobs = {id.job for id in ids if isinstance(id, RankId | ReplicaId)} | {
        move.job for move in getattr(record, "moves", ())
    }
    return frozenset(jobs | {getattr(record, "job", "")} - {""})


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """One append to the log: what one weaver decided at one moment, all of it or nothing."""

    term: int
    at: float
    records: tuple[Record, ...]
    format: int = 1
    """Of the records (core/state/cluster.py). The first one was not written down."""
