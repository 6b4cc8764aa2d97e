"""The conversation of an agent with the weaver: node beats, and the commands that an agent receives."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from torchloom.protocol.ids import Incarnation, Name, RankNumber, Seconds, Text
from torchloom.protocol.job_spec import Task
from torchloom.protocol.message import Message, Part
from torchloom.protocol.phrase import Statement
from torchloom.protocol.rank import PhaseName

ExitCause = Literal["", "exception", "out_of_memory", "not_started"]
"""Why a process ended, as far as its agent knows."""


class RankStatus(Part, frozen=True):
    """One process of an attempt, as its agent knows it."""

    rank: RankNumber
    incarnation: Incarnation
    pid: int = 0
    state: Literal["starting", "running", "ended"] = "starting"
    code: int | None = None
    signal: Annotated[str, Meta(max_length=32)] = ""
    evidence: Statement = ""
    """How it ended, with the last lines of its stderr."""
    error: Statement = ""
    """The exception with which it ended, as text, or what else is known about why it ended."""
    cause: ExitCause = ""
    warm: bool = False
    why_cold: Statement = ""
    step: int = 0
    """The last that was seen, up to the end of the process; 0 where it cannot be seen."""
    idle_seconds: Seconds = 0.0
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


ThrottleReason = Literal[
    "hardware slowdown", "hardware thermal slowdown", "power brake", "thermal slowdown", "power cap"
]


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
    throttled: Annotated[tuple[ThrottleReason, ...], Meta(max_length=8)] = ()
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
    trouble: Statement = ""
    """Why it cannot be run here at all."""
    trouble_code: int = 1
    """With which a launcher should end because of it."""
    retry: bool = False
    """The next attempt does not have this trouble."""
    ranks: Annotated[tuple[RankStatus, ...], Meta(max_length=1024)] = ()


class Check(Part, frozen=True):
    """One thing that was looked at to see whether a node is fit."""

    what: Annotated[str, Meta(max_length=64)]
    found: Statement
    fit: bool = True
    remedy: Statement = ""


class Fitness(Part, frozen=True):
    """Whether a node is fit for ranks, as its agent found when it last looked."""

    number: int
    """The how-manieth look in the life of the agent."""
    running: bool = False
    """It looks just now; the rest is what it found before."""
    folder: Annotated[str, Meta(max_length=4096)] = ""
    """For checkpoints, at which it looked too."""
    unfit: Annotated[tuple[Statement, ...], Meta(max_length=64)] = ()
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
    loader_budget: Annotated[int, Meta(ge=0, le=100_000)] | None = None
    """Loaders that its jobs may have in all; absent: as its cores allow."""
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


class Place(Part, frozen=True):
    """One rank of an attempt and where it runs."""

    rank: RankNumber
    local: RankNumber
    node: Name
    incarnation: Incarnation
    device: str = ""
    """Which of the node's devices it has; empty where there are none."""
    slot: int | None = None
    """The place of the device in the node's list, or of a core; absent where the script chooses its device."""


class Rollback(Part, frozen=True):
    """Resume from before a step, and put aside what was saved since."""

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
    """There was a checkpoint before that step: if none is found, that is an error, and the job does not start over."""


class AttemptCommand(Message, frozen=True):
    """Base of the commands to an agent: each is about one attempt."""

    term: int
    job: Name
    attempt: int


class Prepare(AttemptCommand, frozen=True):
    """Find what to resume from and a port to meet at. Answered in beats."""

    task: Task
    ordinal: int = 1
    """The how-manieth attempt of its run this is; `attempt` counts on over all runs of the job."""
    submitted: float = 0.0
    rollback: Rollback | None = None
    """Do not resume from the newest."""


class Launch(AttemptCommand, frozen=True):
    """Start these ranks. Told again until beats show them."""

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


class Halt(AttemptCommand, frozen=True):
    """End what is left of an attempt: ask, and after the grace kill."""

    grace_seconds: float = 0.0
    kill: tuple[RankNumber, ...] = ()
    """These at once: they cannot hear."""


class Examine(AttemptCommand, frozen=True):
    """Look whether the node is fit for ranks of a job. Answered in beats."""

    folder: Annotated[str, Meta(max_length=4096)] = ""
    """Where its checkpoints will be written."""


class Inspect(AttemptCommand, frozen=True):
    """Look at the ranks of an attempt: where is each? Answered with Inspected."""

    incident: Name


class Dismiss(AttemptCommand, frozen=True):
    """An attempt is over and known to be: forget it."""

    last: bool = False
    """No further attempt follows: what was kept ready for it is not needed."""


NodeCommand = Prepare | Launch | Halt | Examine | Inspect | Dismiss
