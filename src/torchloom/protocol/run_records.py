"""Records about jobs that torchLoom starts: runs and their attempts."""

from __future__ import annotations

from typing import Literal

from torchloom.protocol.job import EventKind, Task
from torchloom.protocol.message import Message, Part
from torchloom.protocol.node import ExitCause, Place, Rollback
from torchloom.protocol.phrase import Prose


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
    reason: Prose = ""


class AttemptLaunched(Message, frozen=True):
    """Its agents have the command to start it: where ranks meet, and what they resume from."""

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
    why_cold: Prose = ""


class AttemptPaused(Message, frozen=True):
    """All its ranks are paused, or continue."""

    job: str
    attempt: int
    held: bool = True


class AttemptStopping(Message, frozen=True):
    """One of its ranks failed, or it is not wanted any more: all of them are ended."""

    job: str
    attempt: int
    reason: Prose
    kind: EventKind | None = None
    failure: Failure | None = None
    """Absent if it may well not happen again."""
    step: int = 0
    """The furthest step that was reported."""
    next_action: Literal["restart", "fail", "cancel", "done"] = "restart"
    code: int = 1
    """What the one who started it exits with if this is the end."""
    counts: bool = True
    """Against the restarts that are allowed."""
    kill_now: tuple[int, ...] = ()
    """Ranks that are killed at once, because they cannot hear."""
    rollback: Rollback | None = None
    incident: str = ""
    """That it was stopped for."""


class AttemptEnded(Message, frozen=True):
    """None of its processes is left."""

    job: str
    attempt: int
    wait_seconds: float = 0.0
    """Before the next one begins."""


class RunEnded(Message, frozen=True):
    job: str
    phase: Literal["done", "failed", "cancelled"]
    reason: Prose = ""
    step: int = 0
    """The furthest step that was reported."""
