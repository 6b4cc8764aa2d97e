"""Every message torchLoom sends: frozen, tagged, JSON on the wire. Decoding is the check at the door.

Who a rank is stands in the *subject* it speaks on, where the server enforces it, never in the payload; a payload
names only the incarnation that speaks. Unknown fields are ignored, so an older reader understands a newer writer;
an unknown tag, a wrong type or a value out of bounds is refused whole.

    rank     → weaver   Report   Hello Goodbye Knobs Saved SaveFailed Resumed      durable: on the server's disk
                                 Joined Regrouped Healed Discarded                 of replicas under torchft
    rank     → weaver   Reply    Standing Ready Applied Ordered   to a command; asked for again until it comes
    rank     → weaver   Beat                              once a second, never stored one by one
    agent    → weaver   NodeBeat                          once a second, and when something changed
    anyone who knows → weaver   Fact   DeviceFailed DeviceRecovered DeviceWarned RankExited Inspected   durable
    operator → weaver   Ask      Fail Recover Register SetKnobs Revert Steer Submit Cancel Drain
                                 EvictReplica DrainReplica                         → Done or No
    viewer   → weaver   Look     LookFabric LookCurves LookKnobs LookCheckpoints LookRuns    answered with a picture
    weaver   → rank     Command  Welcome Introduce Muted Farewell WhereAreYou Propose Verdict Order
    weaver   → agent    NodeCommand   Prepare Launch Halt Examine Inspect Dismiss   told until beats show that it is so
    weaver   → lighthouse   Evict                         told until its beats show that it is so
    lighthouse → weaver, ranks   LighthouseBeat           once a second, and when something changed
    weaver   → log      Entry    of Records: everything the weaver knows is a fold of these
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Annotated, Any, Final, Literal, NamedTuple

import msgspec
from msgspec import Meta

from torchloom.errors import BadName

NAME = re.compile(r"[A-Za-z0-9_:-]{1,128}")
MAX_METRICS: Final = 32
"""User metrics in one beat; further names are dropped and counted."""
MAX_RANK: Final = 1_000_000

Name = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_:-]{1,128}$")]
Text = Annotated[str, Meta(max_length=2000)]
"""Free text for people, bounded."""
Incarnation = Annotated[str, Meta(pattern=r"^[0-9a-f]{24}$")]
"""Which life of a rank: 12 hex digits of milliseconds, 12 of chance. The greater string is the newer life."""
RankNumber = Annotated[int, Meta(ge=0, le=MAX_RANK)]
Seconds = Annotated[float, Meta(ge=0)]


def check_name(what: str, name: object) -> str:
    """The name itself if it can be a subject token, otherwise BadName."""
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise BadName(what, name)
    return name


class ReplicaId(NamedTuple):
    job: str
    replica: str

    def __str__(self) -> str:
        return f"{self.job}/{self.replica}"


class RankId(NamedTuple):
    job: str
    replica: str
    rank: int

    @property
    def of(self) -> ReplicaId:
        return ReplicaId(self.job, self.replica)

    def __str__(self) -> str:
        return f"{self.job}/{self.replica}/{self.rank}"


class Message(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag=True, tag_field="is"):
    """Base of everything on the wire; the class name is its tag."""


class Part(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Base of what stands inside messages."""


# ── rank → weaver ────────────────────────────────────────────────────────────────────────────────────────────────────


class Hello(Message, frozen=True):
    """A rank begins a life: who speaks, from where, on what."""

    incarnation: Incarnation
    node: Annotated[str, Meta(max_length=255)]
    pid: int
    devices: Annotated[tuple[Name, ...], Meta(max_length=64)]
    world_size: Annotated[int, Meta(ge=1, le=MAX_RANK)] = 1
    launcher: Annotated[str, Meta(max_length=64)] = ""
    version: Annotated[str, Meta(max_length=64)] = ""
    step: int = 0
    counted: bool = False
    """Its script has not attached: the steps of its optimizer are counted, and nothing else is known of it."""
    process: Annotated[str, Meta(max_length=255)] = ""
    """Which of which kernel (process.py)."""


KnobName = Annotated[str, Meta(pattern=r"^[A-Za-z][A-Za-z0-9_:-]{0,63}$")]
Value = bool | int | float | Annotated[str, Meta(max_length=1000)] | tuple[float, ...]
"""What a knob can hold."""
Values = Annotated[dict[KnobName, Value], Meta(max_length=64)]
RequestId = Annotated[str, Meta(pattern=r"^[0-9a-f]{32}$")]
"""Made by who asks; the same at every repetition, so that a thing asked twice is done once."""


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


class Knobs(Message, frozen=True):
    """A rank says which values it lets be changed, and whether it can save a checkpoint when asked."""

    incarnation: Incarnation
    knobs: Annotated[tuple[KnobSpec, ...], Meta(max_length=128)]
    checkpoints: bool = False


class Goodbye(Message, frozen=True):
    """A life ends on purpose, or by an error that Python could still report."""

    incarnation: Incarnation
    how: Literal["finished", "interrupted", "failed"]
    error: Text = ""
    step: int = 0


class Saved(Message, frozen=True):
    """A checkpoint is on disk, whole and durable. Told by the one rank that completes it."""

    incarnation: Incarnation
    step: int
    folder: Text
    """Absolute path of the folder that holds `step-N`."""
    size: int
    seconds: Seconds
    """From the beginning of the copy out until it was durable."""
    stall: Seconds = 0.0
    """Of which training stood still."""


class SaveFailed(Message, frozen=True):
    """A checkpoint could not be written; the last good one is still there, and the next interval tries again."""

    incarnation: Incarnation
    step: int
    folder: Text
    why: Text


class Resumed(Message, frozen=True):
    """Training goes on from a checkpoint."""

    incarnation: Incarnation
    step: int
    path: Text
    rejected: Annotated[dict[Annotated[str, Meta(max_length=255)], Text], Meta(max_length=100)] = {}
    """Newer ones that were not whole, and why."""


class Joined(Message, frozen=True):
    """The rank belongs to a torchft replica, under the id that torchft made for this life of it."""

    incarnation: Incarnation
    member: Name
    """`name:uuid`."""
    lighthouse: Text = ""
    """The address the replica was given."""
    version: Annotated[str, Meta(max_length=64)] = ""
    """Of torchft."""


class Regrouped(Message, frozen=True):
    """torchft has put the replica into another quorum. Told by rank 0 of each."""

    incarnation: Incarnation
    quorum: int
    step: int
    participants: int


class Healed(Message, frozen=True):
    """The replica has taken over the state of a peer. Told by rank 0 of it."""

    incarnation: Incarnation
    step: int
    source: Text = ""
    """Whose."""
    seconds: Seconds = 0.0


class Discarded(Message, frozen=True):
    """Steps that the replica did not commit, since this was last told. Told by rank 0 of it."""

    incarnation: Incarnation
    step: int
    """That was tried, and will be again."""
    count: Annotated[int, Meta(ge=1)]
    quorum: int
    why: Text = ""


PhaseName = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_-]{0,32}$")]


class StepTimes(Part, frozen=True):
    """Step durations since the last beat, in seconds."""

    count: int
    p50: float
    p99: float
    longest: float
    own: float | None = None
    """Median of what the rank itself needed, without waiting for its peers; absent where that is not known."""
    data: float | None = None
    """Median of what was spent waiting for the next batch; absent where that is not known."""


class Beat(Message, frozen=True):
    """What a rank says every second: where it is and how it fares."""

    incarnation: Incarnation
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
    still: Seconds = 0.0
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


Report = Hello | Goodbye | Knobs | Saved | SaveFailed | Resumed | Joined | Regrouped | Healed | Discarded


# ── rank → weaver, in reply to a command ─────────────────────────────────────────────────────────────────────────────


class Standing(Message, frozen=True):
    """Where a rank is: so many steps finished, this long each."""

    incarnation: Incarnation
    id: str
    step: int
    step_seconds: float = 0.0
    paused: bool = False
    knobs: Annotated[dict[str, Value], Meta(max_length=128)] = {}
    """Values as they are now; told by rank 0 of a replica."""


class Ready(Message, frozen=True):
    """A rank promises not to pass the step of a change without a verdict; or says why it cannot take it."""

    incarnation: Incarnation
    id: str
    ok: bool
    why: Text = ""
    step: int = 0
    late: bool = False
    """The only trouble is that the step has passed: a later one may do."""


class Applied(Message, frozen=True):
    """A rank has taken a change at this step."""

    incarnation: Incarnation
    id: str
    step: int
    ok: bool = True
    result: Text = ""
    """What came of it (the path of a checkpoint), or why it failed."""


class Ordered(Message, frozen=True):
    """What became of an order."""

    incarnation: Incarnation
    id: str
    outcome: Literal["applied", "refused", "expired"]
    text: Annotated[str, Meta(max_length=60_000)] = ""


Reply = Standing | Ready | Applied | Ordered


# ── whoever knows → weaver ───────────────────────────────────────────────────────────────────────────────────────────


AlertName = Annotated[str, Meta(max_length=64)]


class DeviceFailed(Message, frozen=True):
    """A monitoring system, an agent or a person says that a device is broken."""

    device: Name
    cause: Text = "unspecified"
    source: Text = "monitoring"
    alert: AlertName = ""
    """The alert that says so, under the name it has also when it is over; empty: the source itself."""
    began: Seconds = 0.0
    """Which time the alert fires: when it began to."""


class DeviceRecovered(Message, frozen=True):
    """Whoever said that a device is broken says that it is not any more. It works again once nobody says so."""

    device: Name
    source: Text = "monitoring"
    alert: AlertName = ""
    began: Seconds = 0.0


ALL_OVER: Final = "all"
"""Of a DeviceWarned that is over: whatever was told of this device before does not hold any more."""


class DeviceWarned(Message, frozen=True):
    """A device is not broken but not well: too hot, throttled, losing memory rows. Or it is well again."""

    device: Name
    what: Annotated[str, Meta(max_length=64)]
    """Which condition, in a word: the same at its end. At an end also ALL_OVER."""
    detail: Text = ""
    source: Text = "monitoring"
    over: bool = False


class RankStacks(Part, frozen=True):
    """Where the threads of a rank are, or why that cannot be told."""

    rank: RankNumber
    how: Literal["itself", "signal", "py-spy", "none"]
    """The rank told it at its ease; by force, while its interpreter was held; it was read from outside; not at all."""
    text: Annotated[str, Meta(max_length=20_000)] = ""
    state: Annotated[str, Meta(max_length=200)] = ""
    """Of the process, as the kernel sees it."""
    said: Text = ""
    """The last lines it wrote to stderr."""


class Inspected(Message, frozen=True):
    """What an agent found when it looked at the ranks of a job, for an incident."""

    job: Name
    node: Name
    incident: Name
    ranks: Annotated[tuple[RankStacks, ...], Meta(max_length=1024)] = ()
    host: Text = ""
    """How the machine fares: load, pressure, memory."""


class RankExited(Message, frozen=True):
    """Someone who can know, an agent or the kernel, saw the process end. No grace is needed then."""

    job: Name
    replica: Name
    rank: RankNumber
    incarnation: Incarnation
    exit_code: int | None = None
    signal: Annotated[str, Meta(max_length=32)] = ""
    evidence: Text = ""


Fact = DeviceFailed | DeviceRecovered | DeviceWarned | RankExited | Inspected


# ── agent → weaver ───────────────────────────────────────────────────────────────────────────────────────────────────


EventKind = Literal[
    "crash",
    "hang",
    "frozen",
    "held",
    "straggler",
    "not_finite",
    "loss_spike",
    "gradient",
    "starved",
    "slowdown",
    "memory",
    "overdue",
    "device",
    "device_warning",
]
"""What can be wrong. docs/detection.md explains each."""
Response = Literal["report", "stacks", "checkpoint", "pause", "drain", "restart", "evict", "rollback"]


class Rule(Part, frozen=True):
    """What to do when something is wrong with a job."""

    on: EventKind
    do: Annotated[tuple[Response, ...], Meta(min_length=1, max_length=8)]
    after: Seconds | None = None
    """So long it may last before anything is done; absent: as the settings say."""
    back: Annotated[int, Meta(ge=1, le=1000)] = 1
    """Checkpoints to roll back."""
    skip: bool = False
    """Leave out the batches that led there, after a rollback."""
    limit: Annotated[int, Meta(ge=0, le=1_000_000)] | None = None
    """Most often it is done within the job's window of restarts; after that it is only reported."""


class Torchft(Part, frozen=True):
    """A job of replicas that torchft keeps together: each fails and is started again by itself, while others go on."""

    replicas: Annotated[int, Meta(ge=1, le=1000)]
    min_replicas: Annotated[int, Meta(ge=1, le=1000)] = 1
    """Fewer commit no step."""
    spares: Annotated[int, Meta(ge=0, le=1000)] = 0
    """More of them than are needed, kept up to date to step in at once."""
    lighthouse: Annotated[str, Meta(max_length=1000)] = "loom"
    """Ours; `stock`: torchft's own; or the address of one that somebody else runs."""
    heartbeat_timeout: Annotated[float, Meta(gt=0, le=3600)] = 5.0
    """Seconds of silence after which the lighthouse does not count on a replica of which nobody knows more."""
    join_timeout: Annotated[float, Meta(gt=0, le=3600)] = 10.0
    """Seconds a quorum waits for replicas that are alive and not yet ready."""


class Task(Part, frozen=True):
    """What to run, how often, and what to do when it fails."""

    argv: Annotated[tuple[Annotated[str, Meta(max_length=100_000)], ...], Meta(min_length=1, max_length=10_000)]
    """The script and its arguments, or -m, the module and its arguments."""
    python: Annotated[str, Meta(max_length=4096)] = ""
    """The interpreter; empty for the agent's own."""
    cwd: Annotated[str, Meta(max_length=4096)] = ""
    env: Annotated[dict[str, str], Meta(max_length=1000)] = {}
    """Set in addition to the agent's own environment."""
    per_node: Annotated[int, Meta(ge=1, le=1024)] = 1
    """Ranks on each node."""
    least: Annotated[int, Meta(ge=1, le=1024)] | None = None
    """So many on a node will do where there is no room for more; absent: all of them are needed."""
    nodes: Annotated[int, Meta(ge=1, le=10_000)] = 1
    min_nodes: Annotated[int, Meta(ge=1, le=10_000)] | None = None
    """So many nodes will do where there are no more; absent: all of them are needed."""
    node: Name | None = None
    """Where, if it must be there."""
    max_restarts: Annotated[int, Meta(ge=0, le=1_000_000)] = 3
    window_seconds: Annotated[float, Meta(gt=0)] = 3600.0
    """In which so many restarts are allowed."""
    grace_seconds: Annotated[float, Meta(ge=0, le=3600)] = 10.0
    """Between asking a rank to end and killing it."""
    checkpoint_dir: Annotated[str, Meta(max_length=4096)] = ""
    checkpoint_pattern: Annotated[str, Meta(max_length=1000)] = ""
    resume_arg: Annotated[str, Meta(max_length=1000)] = ""
    """Added to the arguments when there is something to resume from: `--resume_from_checkpoint {path}`."""
    standby: bool = True
    """Start from a process that has imported torch already, where that is possible."""
    preload: Annotated[
        tuple[Annotated[str, Meta(pattern=r"^\w+(\.\w+)*$", max_length=200)], ...], Meta(max_length=100)
    ] = ()
    """Modules that such a process imports besides torch."""
    log_dir: Annotated[str, Meta(max_length=4096)] = ""
    attended: bool = False
    """Whoever started it runs its ranks himself: without him there is nobody to go on."""
    policy: Annotated[tuple[Rule, ...], Meta(max_length=64)] = ()
    """What is to be done other than by default."""
    dry_run: bool = False
    """Only say what the policy would do."""
    check: bool = False
    """Look at the nodes before ranks are started there, and leave out those that are not fit."""
    torchft: Torchft | None = None
    part_of: Name | None = None
    """The job that this is one replica of; absent where it is all of it."""
    replica: Name = "main"
    """What its ranks are a replica of the job under."""


class RankStatus(Part, frozen=True):
    """One process of an attempt, as its agent knows it."""

    rank: RankNumber
    incarnation: Incarnation
    pid: int = 0
    state: Literal["starting", "running", "ended"] = "starting"
    code: int | None = None
    signal: Annotated[str, Meta(max_length=32)] = ""
    evidence: Text = ""
    """How it ended, and the last it said."""
    warm: bool = False
    why_cold: Text = ""
    step: int = 0
    """The last that was seen, up to the end of the process; 0 where it cannot be seen."""
    still: Seconds = 0.0
    """Seconds in which the agent has watched it make no step."""
    frozen: Seconds = 0.0
    """Seconds in which the agent has seen the process stopped (SIGSTOP)."""
    held: Seconds = 0.0
    """Seconds in which no other thread of it got the interpreter."""
    computes: bool = False
    """It used the processor meanwhile."""
    phase: PhaseName = ""


class Pressure(Part, frozen=True):
    """Share of the last ten seconds in which something on the machine waited, in percent (PSI)."""

    cpu: float = 0.0
    memory: float = 0.0
    io: float = 0.0


class Reading(Part, frozen=True):
    """What a device says of itself."""

    device: Name
    name: Annotated[str, Meta(max_length=100)] = ""
    utilisation: float | None = None
    """Percent."""
    memory_mb: float | None = None
    memory_total_mb: float | None = None
    temperature: float | None = None
    """Degrees Celsius."""
    power_watts: float | None = None
    ecc_errors: int | None = None
    """Uncorrected, since the driver was loaded."""
    throttled: Annotated[str, Meta(max_length=100)] = ""
    """Why it runs slower than it could; empty if it does not."""


class AttemptStatus(Part, frozen=True):
    """An attempt to run a job, as one agent knows it."""

    job: Name
    attempt: int
    port: int = 0
    """Where its ranks meet; given by the agent of its first rank when it has prepared the attempt."""
    resume: Text = ""
    resume_step: int | None = None
    rejected: Annotated[dict[Annotated[str, Meta(max_length=255)], Text], Meta(max_length=100)] = {}
    trouble: Text = ""
    """Why it cannot be run here at all."""
    trouble_code: int = 1
    """With which a launcher should end because of it."""
    ranks: Annotated[tuple[RankStatus, ...], Meta(max_length=1024)] = ()


class Check(Part, frozen=True):
    """One thing that was looked at to see whether a node is fit."""

    what: Annotated[str, Meta(max_length=64)]
    found: Text
    fit: bool = True
    remedy: Text = ""


class Fitness(Part, frozen=True):
    """Whether a node is fit for ranks, as its agent found when it last looked."""

    number: int
    """The how-manieth look in the life of the agent."""
    running: bool = False
    """It looks just now; the rest is what it found before."""
    folder: Annotated[str, Meta(max_length=4096)] = ""
    """For checkpoints, at which it looked too."""
    unfit: Annotated[tuple[Text, ...], Meta(max_length=64)] = ()
    """Why not."""
    pace: Seconds | None = None
    """How long the same small computation takes on every node; absent where it could not be made."""
    on: Annotated[str, Meta(max_length=100)] = ""
    """What computed it: only those on the same are compared."""


class NodeBeat(Message, frozen=True):
    """What an agent says every second, and at once when something changed: its node, and all it runs there."""

    incarnation: Incarnation
    host: Annotated[str, Meta(max_length=255)]
    """Under which other nodes reach it."""
    cores: int
    memory_mb: int
    devices: Annotated[tuple[Name, ...], Meta(max_length=64)] = ()
    standby_mb: int = 0
    """Memory of processes that wait to become ranks."""
    pid: int = 0
    tied: bool = False
    """It serves the one who started it and nobody else, and its ranks die with it."""
    leaving: bool = False
    """It is about to end, and its ranks with it: nothing more is started here."""
    attempts: Annotated[tuple[AttemptStatus, ...], Meta(max_length=1000)] = ()
    pressure: Pressure | None = None
    readings: Annotated[tuple[Reading, ...], Meta(max_length=64)] = ()
    fitness: Fitness | None = None
    """Absent until someone has asked for it."""


# ── operator and viewer → weaver ─────────────────────────────────────────────────────────────────────────────────────


class Fail(Message, frozen=True):
    device: Name
    cause: Text = "unspecified"
    operator: Text = ""


class Recover(Message, frozen=True):
    device: Name
    operator: Text = ""


class Register(Message, frozen=True):
    """By hand: this replica uses this device."""

    device: Name
    job: Name
    replica: Name
    node: Annotated[str, Meta(max_length=255)] = ""
    operator: Text = ""


Action = Literal["set", "pause", "stop", "checkpoint"]
"""What a change does to all its ranks at one step."""


Patience = Annotated[float, Meta(gt=0, le=86_400)]
"""Seconds after which who waits for a certain change to take effect is told that it is certain."""


class SetKnobs(Message, frozen=True):
    """Change values on all ranks of a job (or of one replica, or of one rank) at one step."""

    request: RequestId
    job: Name
    values: Values
    replica: Name | None = None
    rank: RankNumber | None = None
    at_step: Annotated[int, Meta(ge=1, le=2**53)] | None = None
    over: Annotated[int, Meta(ge=0, le=10_000_000)] = 0
    """Steps over which the values move from old to new."""
    dry_run: bool = False
    wait: bool = True
    """Answer when it has taken effect; otherwise when it is certain that it will."""
    patience: Patience = 10.0
    operator: Text = ""


class Revert(Message, frozen=True):
    """Undo a change: the values it found come back, at one step."""

    request: RequestId
    job: Name
    change: Name
    patience: Patience = 10.0
    operator: Text = ""


class Steer(Message, frozen=True):
    """Do something to all ranks of a job, of one replica, or to one rank."""

    request: RequestId
    verb: Literal["pause", "resume", "stop", "checkpoint", "kill", "stacks"]
    job: Name
    replica: Name | None = None
    rank: RankNumber | None = None
    patience: Patience = 10.0
    operator: Text = ""


class Submit(Message, frozen=True):
    """Run a job."""

    request: RequestId
    job: Name
    task: Task
    operator: Text = ""


class Cancel(Message, frozen=True):
    """End a job that was submitted, and do not start it again."""

    request: RequestId
    job: Name
    why: Text = "cancelled"
    operator: Text = ""


class Drain(Message, frozen=True):
    """Start nothing more on a node, or again; what runs there goes on."""

    node: Name
    undo: bool = False
    operator: Text = ""


class EvictReplica(Message, frozen=True):
    """Kill a replica and do not count on it any more; if torchLoom started it, start it again."""

    job: Name
    replica: Name
    operator: Text = ""


class DrainReplica(Message, frozen=True):
    """Have a replica leave at the end of a step, and start it again only when that is undone."""

    job: Name
    replica: Name
    undo: bool = False
    operator: Text = ""


Ask = Fail | Recover | Register | SetKnobs | Revert | Steer | Submit | Cancel | Drain | EvictReplica | DrainReplica


class Done(Message, frozen=True):
    """Decided and in the log."""

    text: str
    replicas: tuple[ReplicaId, ...] = ()
    change: str = ""
    step: int | None = None
    """At which a change takes effect."""
    results: tuple[tuple[RankId, str], ...] = ()
    """What each rank had to say."""


class No(Message, frozen=True):
    """Understood and refused; nothing changed."""

    why: str
    hint: str = ""


class LookFabric(Message, frozen=True):
    """A picture of everything, ranks in pages."""

    job: Name | None = None
    offset: Annotated[int, Meta(ge=0)] = 0
    limit: Annotated[int, Meta(ge=0, le=1000)] = 1000
    readings: bool = False
    """With what devices say of themselves; the pages must be smaller then, to fit a message."""
    incident: Name | None = None
    """Of incidents this one alone, with all that is known of it; otherwise old ones are told in short."""


class LookCurves(Message, frozen=True):
    """The downsampled history of each rank of a job."""

    job: Name
    replica: Name | None = None
    offset: Annotated[int, Meta(ge=0)] = 0
    limit: Annotated[int, Meta(ge=1, le=100)] = 100


class LookKnobs(Message, frozen=True):
    """The knobs of a job and the changes made to them."""

    job: Name


class LookRuns(Message, frozen=True):
    """The jobs that torchLoom starts itself, or one of them, and the nodes that agents run on."""

    job: Name | None = None


class LookLines(Message, frozen=True):
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


class LookFitness(Message, frozen=True):
    """Is a node fit for ranks? Asked of its agent, which looks now."""

    folder: Annotated[str, Meta(max_length=4096)] = ""
    """Where checkpoints will be written."""


class LookExchange(Message, frozen=True):
    """How fast is the network to a peer that is asked the same? Asked of both agents."""

    host: Annotated[str, Meta(max_length=255)]
    port: Annotated[int, Meta(ge=1, le=65_535)]
    rank: Annotated[int, Meta(ge=0, le=1)]


NodeLook = LookFitness | LookExchange


class LookCheckpoints(Message, frozen=True):
    """The checkpoints that a job has told of."""

    job: Name


Look = LookFabric | LookCurves | LookKnobs | LookCheckpoints | LookRuns


# ── weaver → rank ────────────────────────────────────────────────────────────────────────────────────────────────────


class Committed(Part, frozen=True):
    """A change as a rank takes it."""

    id: Name
    number: int
    step: int
    """Takes effect when so many steps are finished."""
    action: Action = "set"
    values: Values = {}
    over: int = 0
    key: Name | None = None
    """What its verdict is written under: known to those it was proposed to, so that no one else can judge it."""
    withdraws: str = ""
    """A change of the same step that is not to have any effect after all."""


class Welcome(Message, frozen=True):
    """You are known. Beat this often."""

    term: int
    incarnation: Incarnation
    beat_seconds: Annotated[float, Meta(gt=0, le=3600)]
    changes: tuple[Committed, ...] = ()
    """Of the job so far: in force from their steps on."""


class Introduce(Message, frozen=True):
    """Someone beats whom I do not know: say Hello."""

    term: int
    incarnation: Incarnation


class Muted(Message, frozen=True):
    """A newer life of this rank exists; the addressed one is not listened to."""

    term: int
    incarnation: Incarnation
    newest: Incarnation
    why: Text = ""


class Farewell(Message, frozen=True):
    """Your goodbye is in the log."""

    term: int
    incarnation: Incarnation


class WhereAreYou(Message, frozen=True):
    """A change is being prepared: how far are you? Answered with Standing."""

    term: int
    incarnation: Incarnation
    id: str


class Propose(Message, frozen=True):
    """Take this change at its step, if the verdict is commit. Answered with Ready."""

    term: int
    incarnation: Incarnation
    job: Name
    change: Committed


class Verdict(Message, frozen=True):
    """The change is to be taken, or not. Answered with Applied once taken."""

    term: int
    incarnation: Incarnation
    id: Name
    commit: bool


class Order(Message, frozen=True):
    """Do this now. Answered with Ordered."""

    term: int
    incarnation: Incarnation
    id: Name
    verb: Literal["resume", "kill", "stacks"]
    seconds: Annotated[float, Meta(gt=0, le=3600)] = 10.0
    """Until it expires, from when it is heard."""


Command = Welcome | Introduce | Muted | Farewell | WhereAreYou | Propose | Verdict | Order


# ── weaver → agent ───────────────────────────────────────────────────────────────────────────────────────────────────


class Place(Part, frozen=True):
    """One rank of an attempt and where it runs."""

    rank: RankNumber
    local: RankNumber
    node: Name
    incarnation: Incarnation
    device: str = ""
    """Which of the node's devices it has; empty where there are none."""


class Rollback(Part, frozen=True):
    """Go on from before a step, and put aside what was saved since."""

    before: int
    back: int = 1
    """From the how-manieth checkpoint before it."""
    skip: tuple[int, int] | None = None
    """The batches of these steps, first and last, are left out this time."""
    incident: str = ""
    """For which it is done: asked for again, by the same or by the next attempt, it goes back no further."""
    folder: Text = ""
    """Where its ranks said that they save, for a job that has not named its folder."""
    saved: bool = False
    """There was a checkpoint before that step: not to find any is trouble, and no reason to begin anew."""


class Prepare(Message, frozen=True):
    """Find what to resume from and a port to meet at. Answered in beats."""

    term: int
    job: Name
    attempt: int
    task: Task
    ordinal: int = 1
    """The how-manieth attempt of its run this is; `attempt` counts on over all runs of the job."""
    submitted: float = 0.0
    rollback: Rollback | None = None
    """Do not resume from the newest."""


class Launch(Message, frozen=True):
    """Start these ranks. Told again until beats show them."""

    term: int
    job: Name
    attempt: int
    task: Task
    places: tuple[Place, ...]
    """Of the whole attempt; an agent starts those on its node."""
    host: str
    port: int
    resume: str = ""
    resume_step: int | None = None
    skip: tuple[int, int] | None = None
    """The batches of these steps, first and last, are left out."""
    creds: dict[str, str] = {}
    """For each rank of the addressed node, by its number: with which it can speak only as itself."""
    ordinal: int = 1
    submitted: float = 0.0


class Halt(Message, frozen=True):
    """End what is left of an attempt: ask, and after the grace kill."""

    term: int
    job: Name
    attempt: int
    grace_seconds: float = 0.0
    kill: tuple[RankNumber, ...] = ()
    """These at once: they cannot hear."""


class Examine(Message, frozen=True):
    """Look whether the node is fit for ranks of a job. Answered in beats."""

    term: int
    job: Name
    attempt: int
    folder: Annotated[str, Meta(max_length=4096)] = ""
    """Where its checkpoints will be written."""


class Inspect(Message, frozen=True):
    """Look at the ranks of an attempt: where is each? Answered with Inspected."""

    term: int
    job: Name
    attempt: int
    incident: Name


class Dismiss(Message, frozen=True):
    """An attempt is over and known to be: forget it."""

    term: int
    job: Name
    attempt: int
    last: bool = False
    """No further attempt follows: what was kept ready for it is not needed."""


NodeCommand = Prepare | Launch | Halt | Examine | Inspect | Dismiss


# ── weaver ↔ lighthouse ──────────────────────────────────────────────────────────────────────────────────────────────


class Evict(Message, frozen=True):
    """These are gone for good: they are not waited for, and every later word of theirs is refused."""

    term: int
    members: Annotated[tuple[Name, ...], Meta(max_length=1000)]
    reason: Text = ""


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


# ── what the log holds ───────────────────────────────────────────────────────────────────────────────────────────────


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
    reason: str = ""


class JobForgotten(Message, frozen=True):
    """Ended long ago: dropped from the fabric, still in the log until the log's own age limit."""

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
    reason: str
    patient: bool = False
    """The process may well be alive (frozen, network): wait longer before calling it dead."""


class RankFound(Message, frozen=True):
    rank: RankId
    incarnation: Incarnation
    reason: str


class RankDied(Message, frozen=True):
    rank: RankId
    incarnation: Incarnation
    reason: str
    confirmed: bool = False
    """Its end was seen or told; a presumed death can still turn out wrong."""


class RankLeft(Message, frozen=True):
    rank: RankId
    incarnation: Incarnation
    how: Literal["finished", "interrupted"]


class RankForgotten(Message, frozen=True):
    """Gone for long and its job goes on without it."""

    rank: RankId


class DeviceSeated(Message, frozen=True):
    """By hand: a device was registered for a replica. (A rank's own devices come with RankJoined.)"""

    device: str
    replica: ReplicaId
    node: str = ""
    operator: str = ""


class DeviceBlamed(Message, frozen=True):
    """Somebody says that a device is broken; others may say so too, each for a reason of his own."""

    device: str
    by: str
    """An alert, a source, or `hand`."""
    cause: str
    began: float = 0.0
    alert: bool = False
    node: str = ""


class DeviceCleared(Message, frozen=True):
    """He does not say so any more."""

    device: str
    by: str


class DeviceMarkedFailed(Message, frozen=True):
    device: str
    cause: str
    source: str
    replicas: tuple[ReplicaId, ...] = ()


class DeviceMarkedRecovered(Message, frozen=True):
    device: str
    source: str


ON_IT = "on it: "
"""How the line of evidence begins that tells the replicas on a device."""


class IncidentOpened(Message, frozen=True):
    id: str
    what: str
    """One line: what went wrong."""
    subject: str
    """The rank (job/replica/rank), device or stream it is about."""
    job: str = ""
    evidence: tuple[str, ...] = ()
    decision: str = ""
    reason: str = ""
    kind: str = ""
    """One of EventKind, where a policy may act on it."""


class IncidentAmended(Message, frozen=True):
    """More is known: evidence is added, a decision or an outcome is replaced."""

    id: str
    evidence: tuple[str, ...] = ()
    decision: str = ""
    reason: str = ""
    outcome: str = ""
    closed: bool = False


class KnobsOffered(Message, frozen=True):
    """What may be changed in a job, when that became more or other."""

    job: str
    knobs: tuple[KnobSpec, ...]
    checkpoints: bool = False


class ChangeProposed(Message, frozen=True):
    """A change is under way: its ranks have been, or are about to be, asked to take it at its step."""

    change: Committed
    job: str
    lives: tuple[tuple[RankId, Incarnation], ...]
    request: str
    operator: str = ""
    before: dict[str, Value] = {}
    replica: str | None = None
    rank: int | None = None
    reverts: str = ""


class ChangeDecided(Message, frozen=True):
    """The verdict, as the server let it be written: all ranks take it at its step, or none does."""

    id: str
    commit: bool
    reason: str = ""


class ChangeSettled(Message, frozen=True):
    """Every rank of the change has said what became of it, or cannot any more."""

    id: str
    applied: int
    outcome: str
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


class OrderEnded(Message, frozen=True):
    id: str
    outcome: str
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
    """A rank goes on from a checkpoint of its job."""

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
    """Ended, or to be ended: the lighthouse of their job is told not to count on them."""

    job: str
    members: tuple[str, ...]
    reason: str = ""


class AttemptNote(Part, frozen=True):
    """What became of one attempt."""

    number: int
    began: float
    running: float | None = None
    stopping: float | None = None
    ended: float | None = None
    resume_step: int | None = None
    step: int = 0
    """The furthest that was heard of."""
    reason: str = ""
    culprit: str = ""
    code: int = 0
    warm: int = 0
    why_cold: str = ""
    heals: bool = False
    """It takes over the state of other replicas."""


class RunSubmitted(Message, frozen=True):
    job: str
    task: Task
    request: str
    operator: str = ""


class AttemptBegan(Message, frozen=True):
    """All ranks of a job are to be started, on these nodes."""

    job: str
    attempt: int
    places: tuple[Place, ...]
    reason: str = ""


class AttemptLaunched(Message, frozen=True):
    """Its agents have been told to start it: where ranks meet, and what they go on from."""

    job: str
    attempt: int
    host: str
    port: int
    resume: str = ""
    resume_step: int | None = None
    rejected: dict[str, str] = {}
    heals: bool = False
    """Other replicas train, and it takes over their state: nothing is to be done again."""


class AttemptRunning(Message, frozen=True):
    """All its ranks are running."""

    job: str
    attempt: int
    warm: int = 0
    why_cold: str = ""


class AttemptHeld(Message, frozen=True):
    """All its ranks are paused, or go on."""

    job: str
    attempt: int
    held: bool = True


class AttemptStopping(Message, frozen=True):
    """One of its ranks failed, or it is not wanted any more: all of them are ended."""

    job: str
    attempt: int
    reason: str
    culprit: str = ""
    """What is compared to tell a crash loop: the rank and how it failed."""
    step: int = 0
    """The furthest step that was heard of."""
    then: Literal["restart", "fail", "cancel", "done"] = "restart"
    code: int = 1
    """What the one who started it exits with if this is the end."""
    counts: bool = True
    """Against the restarts that are allowed."""
    deaf: tuple[int, ...] = ()
    """Ranks that are killed at once, because they cannot hear."""
    rollback: Rollback | None = None
    incident: str = ""
    """That it was stopped for."""


class ResponseBegan(Message, frozen=True):
    """What a policy does about an incident of a job, one thing after the other."""

    job: str
    incident: str
    kind: EventKind
    do: tuple[Response, ...]
    ranks: tuple[int, ...] = ()
    """Who is to blame."""
    reason: str = ""
    step: int = 0
    rollback: Rollback | None = None


class ResponseWent(Message, frozen=True):
    """So much of it is left to be done."""

    job: str
    left: tuple[Response, ...] = ()


class AttemptEnded(Message, frozen=True):
    """None of its processes is left."""

    job: str
    attempt: int
    wait_seconds: float = 0.0
    """Before the next one begins."""


class RunEnded(Message, frozen=True):
    job: str
    phase: Literal["done", "failed", "cancelled"]
    reason: str = ""
    step: int = 0
    """The furthest that was heard of."""


class ReplicaDrained(Message, frozen=True):
    """It is to leave at the end of a step and stay away; or to come back."""

    job: str
    drained: bool
    operator: str = ""


class NodeDrained(Message, frozen=True):
    node: str
    drained: bool
    operator: str = ""


class InboxRead(Message, frozen=True):
    """The durable inbox has been decided on up to here; a restarted weaver goes on after it."""

    seq: int


Record = (
    TermBegan
    | JobBegan
    | JobEnded
    | JobForgotten
    | RankJoined
    | RankAttached
    | RankLost
    | RankFound
    | RankDied
    | RankLeft
    | RankForgotten
    | DeviceSeated
    | DeviceBlamed
    | DeviceCleared
    | DeviceMarkedFailed
    | DeviceMarkedRecovered
    | IncidentOpened
    | IncidentAmended
    | KnobsOffered
    | ChangeProposed
    | ChangeDecided
    | ChangeSettled
    | OrderGiven
    | OrderEnded
    | CheckpointSaved
    | CheckpointFailed
    | JobResumed
    | MemberJoined
    | MemberRegrouped
    | MemberHealed
    | MemberDiscarded
    | MembersEvicted
    | RunSubmitted
    | AttemptBegan
    | AttemptLaunched
    | AttemptRunning
    | AttemptHeld
    | AttemptStopping
    | ResponseBegan
    | ResponseWent
    | AttemptEnded
    | RunEnded
    | ReplicaDrained
    | NodeDrained
    | InboxRead
)


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """One append to the log: what one weaver decided at one moment, all of it or nothing."""

    term: int
    at: float
    records: tuple[Record, ...]


# ── the downsampled history ──────────────────────────────────────────────────────────────────────────────────────────


class Point(NamedTuple):
    """One point of a rank's curve."""

    at: float
    step: int
    loss: float | None
    samples_per_second: float | None


class CurvePoints(msgspec.Struct, frozen=True, kw_only=True):
    """One point for each of some ranks, written every few seconds."""

    points: tuple[tuple[RankId, Point], ...]


# ── what a viewer sees ───────────────────────────────────────────────────────────────────────────────────────────────


class RankView(Part, frozen=True):
    rank: RankId
    presence: str
    since: float
    reason: str
    incarnation: str
    node: str
    pid: int
    devices: tuple[str, ...]
    world_size: int
    heard: float | None = None
    """When it last spoke; absent if not since this weaver began."""
    beat: Beat | None = None
    counted: bool = False
    """Its script has not attached: of its training the step alone is known, counted at its optimizer."""
    member: str = ""
    """The id that torchft has given its replica."""
    evicted: bool = False
    """Its lighthouse gives it no quorum any more, whatever it does."""
    drained: bool = False
    """Its replica was asked to leave, and comes back when it may."""


class JobView(Part, frozen=True):
    job: str
    phase: str
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


class SeatView(Part, frozen=True):
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


class IncidentView(Part, frozen=True):
    id: str
    opened: float
    what: str
    subject: str
    job: str = ""
    evidence: tuple[str, ...] = ()
    decision: str = ""
    reason: str = ""
    outcome: str = ""
    closed: float | None = None
    kind: str = ""
    history: tuple[tuple[float, str], ...] = ()
    """What was decided and done about it, and when."""
    stopped: str = ""
    """The job whose ranks were ended for it."""
    lost_steps: int | None = None
    """To be done again because of it; absent if no attempt was started again."""
    lost_seconds: float | None = None
    """From its first sign until all ranks ran again."""


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
    """Whether deaths are told by the server; without, silence is the only sign."""
    refused: dict[str, int] = {}
    """Messages not accepted since this weaver began, by reason."""
    trouble: str = ""
    """What keeps the weaver from working fully, such as a log that cannot be written."""
    ingress: str = ""
    """Where it takes alerts, or why it does not; empty if it is not meant to."""


class KnobView(Part, frozen=True):
    spec: KnobSpec
    value: Value
    """In force, as far as the weaver knows."""
    elsewhere: dict[str, Value] = {}
    """By replica, where it has another value than the others."""
    changed_by: str = ""
    changed: float | None = None
    change: str = ""


class ChangeView(Part, frozen=True):
    id: str
    job: str
    action: str
    values: dict[str, Value]
    before: dict[str, Value]
    step: int
    over: int
    phase: str
    outcome: str
    operator: str
    asked: float
    target: str
    reverted_by: str = ""
    ranks: int = 0


class KnobsView(Message, frozen=True):
    knobs: tuple[KnobView, ...] = ()
    changes: tuple[ChangeView, ...] = ()
    """Newest first."""


class SavedStep(Part, frozen=True):
    """A checkpoint that was written."""

    step: int
    folder: str
    node: str
    size: int
    seconds: float
    stall: float
    at: float
    """When the weaver learnt of it."""


class FailedStep(Part, frozen=True):
    """A checkpoint that could not be written."""

    step: int
    why: str
    at: float


class ResumedStep(Part, frozen=True):
    """Where training went on."""

    step: int
    path: str
    at: float


class CheckpointsView(Message, frozen=True):
    job: str
    folder: str = ""
    """Where the newest is; empty if none was ever written or tried."""
    node: str = ""
    saved: tuple[SavedStep, ...] = ()
    """The latest, in the order in which they were told of. Some may have been deleted since."""
    failures: int = 0
    failed: FailedStep | None = None
    """The last that could not be written."""
    resumed: ResumedStep | None = None
    """Where training went on the last time."""


class Goodput(Part, frozen=True):
    """What became of the time since a job was submitted: productive and lost seconds make up all of it."""

    elapsed: float
    productive: float
    """All ranks ran, and what they did was not lost later."""
    lost: dict[str, float] = {}
    """By cause: a kind of incident, or waiting, starting, paused, redone, ending, moving, other."""


class RunView(Part, frozen=True):
    """A job that torchLoom starts itself."""

    job: str
    phase: str
    since: float
    submitted: float
    task: Task
    operator: str = ""
    attempt: int = 0
    places: tuple[Place, ...] = ()
    resume: str = ""
    resume_step: int | None = None
    reason: str = ""
    waiting: str = ""
    """What it waits for before it can be started."""
    step: int = 0
    """The furthest that was heard of."""
    notes: tuple[AttemptNote, ...] = ()
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


class FitnessView(Message, frozen=True):
    """What an agent found when it was asked whether its node is fit."""

    checks: Annotated[tuple[Check, ...], Meta(max_length=200)] = ()
    pace: Seconds | None = None
    on: Annotated[str, Meta(max_length=100)] = ""


class ExchangeView(Message, frozen=True):
    mb_per_second: float = 0.0
    trouble: Text = ""
    """Why it could not be measured."""


class ClockView(Message, frozen=True):
    """The time on the weaver's machine."""

    now: float


class RunsView(Message, frozen=True):
    runs: tuple[RunView, ...] = ()
    nodes: tuple[NodeView, ...] = ()


class FabricView(Message, frozen=True):
    plane: PlaneView
    jobs: tuple[JobView, ...] = ()
    ranks: tuple[RankView, ...] = ()
    total_ranks: int = 0
    devices: tuple[DeviceView, ...] = ()
    seats: tuple[SeatView, ...] = ()
    incidents: tuple[IncidentView, ...] = ()
    """All open ones and the latest closed ones, newest first."""


class CurvesView(Message, frozen=True):
    curves: tuple[tuple[RankId, tuple[Point, ...]], ...] = ()
    total: int = 0


Answer = (
    Done
    | No
    | LinesView
    | FabricView
    | CurvesView
    | KnobsView
    | CheckpointsView
    | RunsView
    | FitnessView
    | ExchangeView
    | ClockView
)


# ── the codec ────────────────────────────────────────────────────────────────────────────────────────────────────────


def _decoder(kind: Any) -> Callable[[bytes], Any]:
    """Decode or refuse. JSON nested thousands deep would otherwise be the interpreter's error, not the sender's."""
    decode = msgspec.json.Decoder(kind).decode

    def checked(data: bytes) -> Any:
        try:
            return decode(data)
        except RecursionError:
            raise msgspec.DecodeError("nested too deeply") from None

    return checked


_encoder = msgspec.json.Encoder()
encode = _encoder.encode

decode_report: Callable[[bytes], Report] = _decoder(Report)
decode_beat: Callable[[bytes], Beat] = _decoder(Beat)
decode_reply: Callable[[bytes], Reply] = _decoder(Reply)
decode_fact: Callable[[bytes], Fact] = _decoder(Fact)
decode_ask: Callable[[bytes], Ask] = _decoder(Ask)
decode_look: Callable[[bytes], Look] = _decoder(Look)
decode_look_lines: Callable[[bytes], LookLines] = _decoder(LookLines)
decode_node_look: Callable[[bytes], NodeLook] = _decoder(NodeLook)
decode_command: Callable[[bytes], Command] = _decoder(Command)
decode_entry: Callable[[bytes], Entry] = _decoder(Entry)
decode_node_beat: Callable[[bytes], NodeBeat] = _decoder(NodeBeat)
decode_node_command: Callable[[bytes], NodeCommand] = _decoder(NodeCommand)
decode_evict: Callable[[bytes], Evict] = _decoder(Evict)
decode_lighthouse_beat: Callable[[bytes], LighthouseBeat] = _decoder(LighthouseBeat)
decode_points: Callable[[bytes], CurvePoints] = _decoder(CurvePoints)
decode_answer: Any = _decoder(Answer)
