"""Queries, which are requests to see something and change nothing, and their answers: what viewers receive."""

from __future__ import annotations

from typing import Annotated, Literal, NamedTuple

import msgspec
from msgspec import Meta

from torchloom.protocol import rank as messages
from torchloom.protocol.ids import Name, RankId, RankNumber, ReplicaId, Seconds, Text
from torchloom.protocol.message import Message, Part
from torchloom.protocol.node import Check, NodeBeat, Reading
from torchloom.protocol.operator import Done, No
from torchloom.protocol.records import IncidentOpened, Record
from torchloom.protocol.run_records import RunDescription
from torchloom.protocol.scheduling import PredictionView, QueryPrediction, QuerySchedule, ScheduleView


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


class QueryCheckpoints(Message, frozen=True):
    """The checkpoints that a job has reported."""

    job: Name


Look = QueryCluster | QueryCurves | QueryKnobs | QueryCheckpoints | QueryRuns | QuerySchedule | QueryPrediction
NodeLook = QueryNodeChecks | QueryBandwidth


class Point(NamedTuple):
    """One point of a rank's curve."""

    at: float
    step: int
    loss: float | None
    samples_per_second: float | None


class CurvePoints(msgspec.Struct, frozen=True, kw_only=True):
    """One point for each of some ranks, written every few seconds."""

    points: tuple[tuple[RankId, Point], ...]


class RankView(messages.RankDescription, frozen=True, kw_only=True):
    rank: RankId
    presence: str
    since: float
    reason: str
    heard: float | None = None
    """When it last spoke; absent if not since this weaver began."""
    beat: messages.Beat | None = None
    member: str = ""
    """The id that torchft has given its replica."""
    evicted: bool = False
    """Its lighthouse gives it no quorum any more, whatever it does."""
    drained: bool = False
    """Its replica was asked to leave, and comes back when it may."""


class MarkView(Part, frozen=True):
    """A moment of a job that an operator marked."""

    at: float
    text: str
    record: Record


class JobView(Part, frozen=True):
    job: str
    phase: str
    """Of the job, or of its run while that does not run; `ending` where all ranks have ended and it may restart."""
    began: float
    ended: float | None = None
    reason: str = ""
    ranks: int = 0
    live: int = 0
    step: int | None = None
    """The step of the rank that is least far."""
    loss: float | None = None
    samples_per_second: float | None = None
    paused: bool = False
    marks: tuple[MarkView, ...] = ()
    """Oldest first; only in a view of one job."""


class Assignment(Part, frozen=True):
    device: str
    replica: ReplicaId
    rank: int | None = None
    """Absent where the device was registered by hand."""
    node: str = ""


class DeviceView(Part, frozen=True):
    device: str
    node: str
    health: str
    since: float
    cause: str = ""
    replicas: tuple[ReplicaId, ...] = ()
    reading: Reading | None = None
    """What it last said of itself; absent where no agent reads it."""


class IncidentView(IncidentOpened, frozen=True, kw_only=True, tag=False):
    """An incident as people read it, and what came of it."""

    opened: float
    what: str
    evidence: tuple[str, ...] = ()
    decision: str = ""
    reason: str = ""
    outcome: str = ""
    closed: float | None = None
    short: str = ""
    """What went wrong, in a list that names the job or device beside it."""
    brief: str = ""
    """The decision in few words, as rules have them."""
    decided: float | None = None
    """When it was decided; absent if what was done tells it."""
    history: tuple[tuple[float, str], ...] = ()
    """What else was decided and done about it, and when, in few words."""
    stopped: str = ""
    """The job whose ranks were ended for it."""
    lost_steps: int | None = None
    """To be done again because of it; absent if no attempt was started again."""
    lost_seconds: float | None = None
    """From its first sign until all ranks ran again."""


Trouble = Literal["log", "inbox", "stuck"]
"""The log cannot be written, the inbox cannot be read, nothing has been decided for long."""


class PlaneView(Part, frozen=True):
    """The control plane's own health."""

    weaver: str
    term: int
    began: float
    now: float
    log_seq: int
    version: str
    server: str = ""
    """Name and version of the NATS server it talks to."""
    advisories: bool = True
    """Whether the server reports deaths; without, silence is the only sign."""
    refused: dict[str, int] = {}
    """Messages not accepted since this weaver began, by reason."""
    trouble: str = ""
    """What keeps the weaver from working fully, such as a log that cannot be written."""
    troubles: tuple[Trouble, ...] = ()
    """The same for programs."""
    ingress: str = ""
    """Where it takes alerts."""
    ingress_trouble: str = ""
    """Why it does not, where it is meant to."""


class KnobState(Part, frozen=True):
    """A knob of a job, as the weaver has it."""

    spec: messages.KnobSpec
    value: messages.Value
    """In force, as far as the weaver knows."""
    change: str = ""
    """The change that gave it this value."""


class KnobView(KnobState, frozen=True):
    elsewhere: dict[str, messages.Value] = {}
    """By replica, where it has another value than the others."""
    changed_by: str = ""
    changed: float | None = None


class ChangeView(messages.ChangeSpec, frozen=True, kw_only=True):
    job: str
    before: dict[str, messages.Value]
    phase: str
    outcome: str
    operator: str
    asked: float
    target: str
    reverted_by: str = ""
    overwrites: tuple[str, ...] = ()
    """Later changes that a revert of this one overwrites."""
    ranks: int = 0


class KnobsView(Message, frozen=True):
    knobs: tuple[KnobView, ...] = ()
    changes: tuple[ChangeView, ...] = ()
    """Newest first."""


class SavedStep(messages.CheckpointSaved, frozen=True, kw_only=True, tag=False):
    """A checkpoint that was written, and when the weaver learnt of it."""

    at: float


class FailedStep(messages.CheckpointFailed, frozen=True, kw_only=True, tag=False):
    """A checkpoint that could not be written."""

    at: float


class ResumedStep(messages.JobResumed, frozen=True, kw_only=True, tag=False):
    """Where training resumed."""

    at: float


class CheckpointsView(Message, frozen=True):
    job: str
    folder: str = ""
    """Where the newest is; empty if none was ever written or tried."""
    node: str = ""
    saved: tuple[SavedStep, ...] = ()
    """The latest, in the order in which they were reported. Some may have been deleted since."""
    failures: int = 0
    failed: FailedStep | None = None
    """The last that could not be written."""
    resumed: ResumedStep | None = None
    """Where training resumed the last time."""


class Goodput(Part, frozen=True):
    """How the time since a job arrived was spent: productive and lost seconds make up all of it."""

    elapsed: float
    productive: float
    """All ranks ran, and what they did was not lost later."""
    lost: dict[str, float] = {}
    """By cause: a kind of incident, or waiting, starting, paused, redone, ending, moving, other."""


class RunView(RunDescription, frozen=True, kw_only=True):
    """A job that torchLoom starts itself."""

    job: str
    phase: str
    attempt: int = 0
    reason: str = ""
    waiting: str = ""
    """What it waits for before it can be started."""
    waiting_code: str = ""
    """The same for programs: the code of the phrase."""
    goodput: Goodput | None = None


class NodeView(Part, frozen=True):
    node: str
    beat: NodeBeat
    heard: float
    drained: bool = False
    used: int = 0
    """Ranks that run there."""


class LinesView(Message, frozen=True):
    """A part of what a rank printed."""

    data: bytes = b""
    at: int = 0
    """Its first byte's place in all that was printed."""


class NodeChecksView(Message, frozen=True):
    """What an agent found when it was asked whether its node is fit."""

    checks: Annotated[tuple[Check, ...], Meta(max_length=200)] = ()
    pace: Seconds | None = None
    on: Annotated[str, Meta(max_length=100)] = ""


class BandwidthView(Message, frozen=True):
    mb_per_second: float = 0.0
    trouble: Text = ""
    """Why it could not be measured."""


class ClockView(Message, frozen=True):
    """The time on the weaver's machine."""

    now: float


class RunsView(Message, frozen=True):
    runs: tuple[RunView, ...] = ()
    nodes: tuple[NodeView, ...] = ()


class ClusterView(Message, frozen=True):
    plane: PlaneView
    jobs: tuple[JobView, ...] = ()
    ranks: tuple[RankView, ...] = ()
    total_ranks: int = 0
    devices: tuple[DeviceView, ...] = ()
    assignments: tuple[Assignment, ...] = ()
    incidents: tuple[IncidentView, ...] = ()
    """All open ones and the latest closed ones, newest first."""


class CurvesView(Message, frozen=True):
    curves: tuple[tuple[RankId, tuple[Point, ...]], ...] = ()
    total: int = 0


Answer = (
    Done | No | LinesView | ClusterView | CurvesView | KnobsView
    | CheckpointsView | RunsView | NodeChecksView | BandwidthView | ClockView | ScheduleView | PredictionView
)  # fmt: skip
