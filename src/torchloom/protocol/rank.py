"""The conversation of a rank with the weaver: reports and their records, beats, replies, and commands to the rank."""

from __future__ import annotations

from typing import Annotated, Final, Literal

from msgspec import Meta

from torchloom.protocol.data_loading import DataPlace, Loading
from torchloom.protocol.ids import MAX_RANK, Incarnation, Name, RankId, Seconds, Text
from torchloom.protocol.message import Message, Part

MAX_METRICS: Final = 32
"""User metrics in one beat; further names are dropped and counted."""


KnobName = Annotated[str, Meta(pattern=r"^[A-Za-z][A-Za-z0-9_:-]{0,63}$")]
Value = bool | int | float | Annotated[str, Meta(max_length=1000)] | tuple[float, ...]
"""What a knob can hold."""
Values = Annotated[dict[KnobName, Value], Meta(max_length=64)]
Action = Literal["set", "pause", "stop", "checkpoint"]
"""What a change does to all its ranks at one step."""


KnobRole = Literal["", "batch_size", "accumulation", "lr"]


class KnobSpec(Part, frozen=True):
    """A value of a running job that may be changed."""

    name: KnobName
    kind: Literal["float", "int", "bool", "enum", "text", "floats"]
    value: Value
    """When it was offered."""
    low: float | None = None
    high: float | None = None
    choices: Annotated[tuple[str, ...], Meta(max_length=64)] = ()
    unit: Annotated[str, Meta(max_length=32)] = ""
    help: Annotated[str, Meta(max_length=500)] = ""
    per: Literal["job", "rank"] = "job"
    role: KnobRole = ""
    """What it means to the rules that change several knobs together."""


class RankDescription(Part, frozen=True):
    """One life of a rank: where it runs, and on what."""

    incarnation: Incarnation
    node: Annotated[str, Meta(max_length=255)]
    pid: int
    devices: Annotated[tuple[Name, ...], Meta(max_length=64)]
    world_size: Annotated[int, Meta(ge=1, le=MAX_RANK)] = 1
    counted: bool = False
    """Its script has not attached: the steps of its optimizer are counted, and nothing else is known of it."""


class Hello(RankDescription, frozen=True, tag=True, tag_field="is"):
    """A rank begins a life: who speaks, from where, on what."""

    launcher: Annotated[str, Meta(max_length=64)] = ""
    version: Annotated[str, Meta(max_length=64)] = ""
    step: int = 0
    process: Annotated[str, Meta(max_length=255)] = ""
    """Which of which kernel (shared/process_id.py)."""


class RankMessage(Message, frozen=True):
    """Base of what a rank reports and answers."""

    incarnation: Incarnation


class Knobs(RankMessage, frozen=True):
    """A rank says which values it lets be changed, and whether it can save a checkpoint when asked."""

    knobs: Annotated[tuple[KnobSpec, ...], Meta(max_length=128)]
    checkpoints: bool = False


class Goodbye(RankMessage, frozen=True):
    """A life ends on purpose, or by an error that Python could still report."""

    how: Literal["finished", "interrupted", "failed"]
    error: Text = ""
    step: int = 0


class Saved(RankMessage, frozen=True):
    """A checkpoint is on disk, whole and durable. Told by the one rank that completes it."""

    step: int
    folder: Text
    """Absolute path of the folder that holds `step-N`."""
    size: int
    seconds: Seconds
    """From the beginning of the copy out until it was durable."""
    stall: Seconds = 0.0
    """Of which training stood still."""


class SaveFailed(RankMessage, frozen=True):
    """A checkpoint could not be written; the last good one is still there, and the next interval tries again."""

    step: int
    folder: Text
    why: Text
    error: Annotated[str, Meta(max_length=100)] = ""
    """Its class, and of an OSError the name of its number: `OSError ENOSPC`. The same for failures that are alike."""


class Resumed(RankMessage, frozen=True):
    """Training continues from a checkpoint."""

    step: int
    path: Text
    rejected: Annotated[dict[Annotated[str, Meta(max_length=255)], Text], Meta(max_length=100)] = {}
    """Newer ones that were not whole, and why."""


class Joined(RankMessage, frozen=True):
    """The rank belongs to a torchft replica, under the id that torchft made for this life of it."""

    member: Name
    """`name:uuid`."""
    lighthouse: Text = ""
    """The address the replica was given."""
    version: Annotated[str, Meta(max_length=64)] = ""
    """Of torchft."""


class Regrouped(RankMessage, frozen=True):
    """torchft has put the replica into another quorum. Told by rank 0 of each."""

    quorum: int
    step: int
    participants: int


class Healed(RankMessage, frozen=True):
    """The replica has taken over the state of a peer. Told by rank 0 of it."""

    step: int
    source: Text = ""
    """Whose."""
    seconds: Seconds = 0.0


class Discarded(RankMessage, frozen=True):
    """Steps that the replica did not commit, since this was last told. Told by rank 0 of it."""

    step: int
    """That was tried, and will be again."""
    count: Annotated[int, Meta(ge=1)]
    quorum: int
    why: Text = ""


# What the log has of these reports: the same, with the rank that sent it.


class CheckpointSaved(Saved, frozen=True, kw_only=True):
    rank: RankId
    node: str


class CheckpointFailed(SaveFailed, frozen=True, kw_only=True):
    rank: RankId


class JobResumed(Resumed, frozen=True, kw_only=True):
    rank: RankId


class MemberJoined(Joined, frozen=True, kw_only=True):
    rank: RankId
    devices: tuple[str, ...] = ()


class MemberRegrouped(Regrouped, frozen=True, kw_only=True):
    rank: RankId


class MemberHealed(Healed, frozen=True, kw_only=True):
    rank: RankId


class MemberDiscarded(Discarded, frozen=True, kw_only=True):
    rank: RankId


ReportRecord = (
    CheckpointSaved | CheckpointFailed | JobResumed | MemberJoined | MemberRegrouped | MemberHealed | MemberDiscarded
)


PhaseName = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_-]{0,32}$")]


class StepTimes(Part, frozen=True, gc=False):
    """Step durations since the last beat, in seconds."""

    count: int
    p50: float
    p99: float
    longest: float
    own: float | None = None
    """Median of what the rank itself needed, without waiting for its peers; absent where that is not known."""
    data: float | None = None
    """Median of what was spent waiting for the next batch; absent where that is not known."""


class Beat(Message, frozen=True, gc=False):  # there are very many, and none is part of a cycle
    """What a rank reports every second: its step and its state."""

    incarnation: Annotated[str, Meta(min_length=24, max_length=24)]
    """An Incarnation. Matching its pattern takes as long as decoding the rest, and it is almost always that of a known
    rank. Code that sees another one calls `is_incarnation`."""
    step: Annotated[int, Meta(ge=0, le=2**53)]
    times: StepTimes | None = None
    """Absent while no step was finished since the last beat."""
    loss: float | None = None
    samples_per_second: float | None = None
    metrics: Annotated[dict[str, float], Meta(max_length=MAX_METRICS)] = {}
    not_finite: Annotated[tuple[str, ...], Meta(max_length=MAX_METRICS + 1)] = ()
    """Names among loss and metrics whose value was NaN or infinite: JSON has no word for those."""
    bad_steps: tuple[int, int] | None = None
    """The loss went bad in one of these steps, from the first that may be to the first that is known to be."""
    rss_mb: float = 0.0
    device_mb: float | None = None
    """Memory the rank's allocator holds on its devices; absent without an accelerator."""
    free_mb: float | None = None
    """What the machine, or the rank's cgroup, has left for it; absent where that cannot be known."""
    device_free_mb: float | None = None
    dropped: int = 0
    """Metric values that could not be reported: not a number, or too many names."""
    change: int = 0
    """The number of the newest change of values in force in this rank."""
    paused: bool = False
    knobs: Annotated[dict[str, Value], Meta(max_length=128)] = {}
    """Values as they are now; told by rank 0 of a replica."""
    idle_seconds: Seconds = 0.0
    """Seconds since the last step ended; since the rank attached, before the first."""
    phase: PhaseName = ""
    """What it says it does other than training: "eval", "checkpoint"; empty: it trains."""
    collectives: int | None = None
    """Collectives its main process group has begun so far; absent without one."""
    quorum: int | None = None
    """Of torchft, in which it is; absent without torchft."""
    participants: int | None = None
    """Replicas in that quorum."""
    discarded: int = 0
    """Steps that were not committed, in this life."""
    loading: Loading | None = None
    """Absent without an ElasticLoader that feeds the training."""


Report = Hello | Goodbye | Knobs | Saved | SaveFailed | Resumed | Joined | Regrouped | Healed | Discarded


class RankReply(RankMessage, frozen=True):
    """Base of the answers to commands."""

    id: str
    """Of the change or order, or of the request for it."""


class StepReport(RankReply, frozen=True):
    """Where a rank is: the steps that it has finished, and how long each takes."""

    step: int
    step_seconds: float = 0.0
    paused: bool = False
    knobs: Annotated[dict[str, Value], Meta(max_length=128)] = {}
    """Values as they are now; told by rank 0 of a replica."""


class Ready(RankReply, frozen=True):
    """A rank promises not to pass the step of a change without a verdict; or says why it cannot take it."""

    ok: bool
    why: Text = ""
    step: int = 0
    late: bool = False
    """The only trouble is that the step has passed: a later one may do."""
    place: DataPlace | None = None
    """Where its loader was at the change's `finished` step; of a change of the batch size."""


class Applied(RankReply, frozen=True):
    """A rank has taken a change at this step."""

    step: int
    ok: bool = True
    result: Text = ""
    """What came of it (the path of a checkpoint), or why it failed."""
    pending: bool = False
    """A checkpoint that is still being written: the rank reports it when it is complete."""


class Ordered(RankReply, frozen=True):
    """The result of an order."""

    outcome: Literal["applied", "refused", "expired"]
    text: Annotated[str, Meta(max_length=60_000)] = ""


Reply = StepReport | Ready | Applied | Ordered


class ChangeSpec(Part, frozen=True):
    """A change as a rank takes it."""

    id: Name
    number: int
    step: int
    """Takes effect when this number of steps is finished."""
    action: Action = "set"
    values: Values = {}
    over: int = 0
    key: Name | None = None
    """What its verdict is written under: known to those it was proposed to, so that no one else can judge it."""
    withdraws: str = ""
    """A change of the same step that is not to have any effect after all."""
    finished: int = 0
    """A step that every rank had finished when it was proposed: there they compare how far their loaders are."""


class RankCommand(Message, frozen=True):
    """Base of the commands."""

    term: int
    incarnation: Incarnation


class Welcome(RankCommand, frozen=True):
    """You are known. Beat this often."""

    beat_seconds: Annotated[float, Meta(gt=0, le=3600)]
    changes: tuple[ChangeSpec, ...] = ()
    """Of the job so far: in force from their steps on."""


class Introduce(RankCommand, frozen=True):
    """The sender of a beat is unknown: say Hello."""


class Muted(RankCommand, frozen=True):
    """A newer life of this rank exists; the addressed one is not listened to."""

    newest: Incarnation
    pid: int = 0
    """Of the newer one."""
    node: Annotated[str, Meta(max_length=255)] = ""


class Farewell(RankCommand, frozen=True):
    """Your goodbye is in the log."""


class QueryStep(RankCommand, frozen=True):
    """A change is being prepared: how far are you? Answered with StepReport."""

    id: str


class Propose(RankCommand, frozen=True):
    """Take this change at its step, if the verdict is commit. Answered with Ready."""

    job: Name
    change: ChangeSpec


class Verdict(RankCommand, frozen=True):
    """The change is to be taken, or not. Answered with Applied once taken."""

    id: Name
    commit: bool


class Order(RankCommand, frozen=True):
    """Do this now. Answered with Ordered."""

    id: Name
    verb: Literal["resume", "kill", "stacks"]
    seconds: Annotated[float, Meta(gt=0, le=3600)] = 10.0
    """Until it expires, from when it is heard."""


Command = Welcome | Introduce | Muted | Farewell | QueryStep | Propose | Verdict | Order
