"""Records about jobs that torchLoom starts: runs and their attempts."""

from __future__ import annotations

from typing import Literal

from torchloom.protocol.job_spec import EventKind, Response, Task
from torchloom.protocol.message import Message, Part
from torchloom.protocol.node import ExitCause, Place, Rollback
from torchloom.protocol.operator import Mark, Submit
from torchloom.protocol.phrase import Prose

NextAction = Literal["restart", "fail", "cancel", "done", "release"]
"""What follows when all ranks of an attempt have ended."""


class Failure(Part, frozen=True):
    """How an attempt failed. Two that failed in the same way, without a step forward, are a crash loop."""

    kind: EventKind
    ranks: tuple[int, ...] = ()
    """Who was to blame, of a trouble that the policy acts on."""
    signal: str = ""
    code: int | None = None
    cause: ExitCause = ""
    error: str = ""
    """The exception as the rank wrote it."""


class AttemptNote(Part, frozen=True):
    """How one attempt went."""

    number: int
    began: float
    running: float | None = None
    stopping: float | None = None
    ended: float | None = None
    resume_step: int | None = None
    step: int = 0
    """The furthest step that was reported."""
    reason: Prose = ""
    kind: str = ""
    failure: Failure | None = None
    incident: str = ""
    """That it was stopped for."""
    code: int = 0
    warm: int = 0
    why_cold: Prose = ""
    heals: bool = False
    """It takes over the state of other replicas."""
    next_action: NextAction = "restart"
    """What followed when it was stopped."""


class RunDescription(Part, frozen=True):
    """A run, as far as the state of the weaver and its view have it in common."""

    task: Task
    since: float = 0.0
    """When its phase changed."""
    submitted: float = 0.0
    arrived: float = 0.0
    """Since when it may be started; 0 if it may not yet."""
    operator: str = ""
    places: tuple[Place, ...] = ()
    resume: str = ""
    resume_step: int | None = None
    rejected: dict[str, str] = {}
    """Newer checkpoints that were passed over, and why."""
    notes: tuple[AttemptNote, ...] = ()
    step: int = 0
    """The furthest step that was reported; in the state, once it is over."""


class RunSubmitted(Submit, frozen=True):
    """A job is to be run, as requested; of several replicas each is a run of its own."""


class RunArrived(Message, frozen=True):
    """Its delay has passed and the job that it follows is over: from now on it waits for room."""

    job: str


class AttemptRecord(Message, frozen=True):
    """Base of the records about an attempt."""

    job: str
    attempt: int


class AttemptBegan(AttemptRecord, frozen=True):
    """All ranks of a job are to be started, on these nodes."""

    places: tuple[Place, ...]


class AttemptLaunched(AttemptRecord, frozen=True):
    """Its agents have the command to start it: where ranks meet, and what they resume from."""

    host: str
    port: int
    resume: str = ""
    resume_step: int | None = None
    rejected: dict[str, str] = {}
    heals: bool = False
    """Other replicas train, and it takes over their state: nothing is to be done again."""


class AttemptRunning(AttemptRecord, frozen=True):
    """All its ranks are running."""

    warm: int = 0
    why_cold: Prose = ""


class AttemptStepped(AttemptRecord, frozen=True):
    """It has made its first steps."""

    seconds: float = 0.0
    """About how long they took."""


class AttemptPaused(AttemptRecord, frozen=True):
    """All its ranks are paused, or continue."""

    held: bool = True


class AttemptStopping(AttemptRecord, frozen=True):
    """One of its ranks failed, or it is not wanted any more: all of them are ended."""

    reason: Prose
    kind: EventKind | None = None
    failure: Failure | None = None
    """Absent if it may well not happen again."""
    step: int = 0
    """The furthest step that was reported."""
    next_action: NextAction = "restart"
    code: int = 1
    """What the one who started it exits with if this is the end."""
    counts: bool = True
    """Against the restarts that are allowed."""
    kill_now: tuple[int, ...] = ()
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
    reason: Prose = ""
    step: int = 0
    rollback: Rollback | None = None


class ResponseWent(Message, frozen=True):
    """So much of it is left to be done."""

    job: str
    left: tuple[Response, ...] = ()


class AttemptEnded(AttemptRecord, frozen=True):
    """None of its processes is left."""

    wait_seconds: float = 0.0
    """Before the next one begins."""


class AttemptReleased(AttemptRecord, frozen=True):
    """None of its processes is left, and its devices are free; it continues when it is resumed."""


class ReleaseBegan(Mark, frozen=True):
    """It is to save a checkpoint, and to be released when that is complete."""

    reason: Prose = ""
    """Why, if no operator asked for it."""
    makes_room_for: str = ""
    """The run of a higher priority that gets its room. It is then resumed without a request."""


class ReleaseEnded(Message, frozen=True):
    """It is not released after all, and continues."""

    job: str
    reason: Prose = ""


class RunResumed(Mark, frozen=True):
    """It was released, and is started again when there is room."""


class RunEnded(Message, frozen=True):
    job: str
    phase: Literal["done", "failed", "cancelled"]
    reason: Prose = ""
    step: int = 0
    """The furthest step that was reported."""


AnyAttemptRecord = (
    AttemptBegan | AttemptLaunched | AttemptRunning | AttemptStepped | AttemptPaused | AttemptStopping | AttemptEnded
)
ReleaseRecord = ReleaseBegan | AttemptReleased | ReleaseEnded | RunResumed
RunRecord = RunSubmitted | RunArrived | AnyAttemptRecord | ResponseBegan | ResponseWent | ReleaseRecord | RunEnded
