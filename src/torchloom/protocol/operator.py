"""Requests of operators to the weaver, the records that they alone leave, and the answers `Done` and `No`."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from torchloom.protocol.ids import Name, RankId, RankNumber, ReplicaId, RequestId, Text
from torchloom.protocol.job_spec import Task
from torchloom.protocol.message import Message
from torchloom.protocol.phrase import Prose
from torchloom.protocol.rank import Values
from torchloom.protocol.scheduling import LoaderCount, ObjectiveName, PolicyName, ScheduleRules


class Request(Message, frozen=True, kw_only=True):
    """Base of the requests."""

    operator: Text = ""
    """Who asks."""


class JobRequest(Request, frozen=True):
    """Base of the requests about one job that are repeated until they are answered."""

    request: RequestId
    job: Name


class ReplicaRequest(Request, frozen=True):
    """Base of the requests about one replica."""

    job: Name
    replica: Name


class Fail(Request, frozen=True):
    device: Name
    cause: Text = "unspecified"


class Recover(Request, frozen=True):
    device: Name


class Register(ReplicaRequest, frozen=True):
    """By hand: this replica uses this device."""

    device: Name
    node: Annotated[str, Meta(max_length=255)] = ""


Patience = Annotated[float, Meta(gt=0, le=86_400)]
"""Seconds to wait for a committed change to take effect; then the answer is that it is committed."""


class RankRequest(JobRequest, frozen=True):
    """Base of the requests to all ranks of a job, of one replica, or to one rank."""

    replica: Name | None = None
    rank: RankNumber | None = None
    patience: Patience = 10.0


LrRule = Literal["none", "linear", "sqrt"]


class SetKnobs(RankRequest, frozen=True, kw_only=True):
    """Change values, at one step."""

    values: Values
    at_step: Annotated[int, Meta(ge=1, le=2**53)] | None = None
    over: Annotated[int, Meta(ge=0, le=10_000_000)] = 0
    """Steps over which the values move from old to new."""
    keep_global_batch: bool = False
    """Change the accumulation too, so that a step has as many samples as before."""
    lr_rule: LrRule = "none"
    """How learning rates follow the number of samples in a step."""
    dry_run: bool = False
    wait: bool = True
    """Answer when it has taken effect; otherwise when it is certain that it will."""


class Revert(JobRequest, frozen=True):
    """Undo a change: the values it found come back, at one step."""

    change: Name
    patience: Patience = 10.0


class Steer(RankRequest, frozen=True, kw_only=True):
    verb: Literal["pause", "resume", "stop", "checkpoint", "kill", "stacks"]


class Submit(JobRequest, frozen=True):
    """Run a job."""

    task: Task


class Cancel(JobRequest, frozen=True):
    """End a job that was submitted, and do not start it again."""

    why: Text = "cancelled"


class Release(JobRequest, frozen=True):
    """Save a job that torchLoom started, end its ranks and give back what they have, until it is resumed."""


class Drain(Request, frozen=True):
    """Start nothing more on a node, or again; ranks that run there continue."""

    node: Name
    undo: bool = False


class EvictReplica(ReplicaRequest, frozen=True):
    """Kill a replica and do not count on it any more; if torchLoom started it, start it again."""


class DrainReplica(ReplicaRequest, frozen=True):
    """Have a replica leave at the end of a step, and start it again only when that is undone."""

    undo: bool = False


class Annotate(JobRequest, frozen=True):
    """Add a note to a job, also to one that has ended."""

    text: Annotated[str, Meta(min_length=1, max_length=500)]


class SetSchedule(Request, frozen=True, kw_only=True):
    """Change by which rules loaders are allocated. What is absent stays as it is."""

    policy: PolicyName | None = None
    objective: ObjectiveName | None = None
    budgets: Annotated[dict[Name, LoaderCount | None], Meta(max_length=10_000)] = {}
    """Of nodes; null for what their agents say."""


Ask = (
    Fail | Recover | Register | SetKnobs | Revert | Steer | Submit | Cancel | Drain | EvictReplica | DrainReplica
    | Annotate | Release | SetSchedule
)  # fmt: skip


class Done(Message, frozen=True):
    """Decided and in the log."""

    text: Prose
    replicas: tuple[ReplicaId, ...] = ()
    change: str = ""
    step: int | None = None
    """At which a change takes effect."""
    results: tuple[tuple[RankId, str], ...] = ()
    """What each rank had to say."""
    before: Values = {}
    """Of the knobs that a change sets, also by a rule of the request; `values` has the new ones."""
    values: Values = {}
    over: int = 0
    """Steps over which they move there."""
    overwrites: tuple[str, ...] = ()
    """Of a revert: later changes that had set the same knobs."""


class No(Message, frozen=True):
    """Understood and refused; nothing changed."""

    why: Prose
    hint: Prose = ""
    code: str = ""
    """Of the phrase that says why, for programs."""


class Mark(Message, frozen=True):
    """Base of records that stay with their job, for `loom why` and `loom curves` to show."""

    job: str
    request: str
    """A repetition of it leaves no second mark."""
    step: int | None = None
    """Where the job was; absent if no rank had reported."""
    operator: str = ""


class JobAnnotated(Mark, frozen=True):
    text: str = ""


class ReplicaDrained(Message, frozen=True):
    """It is to leave at the end of a step and stay away; or to come back."""

    job: str
    drained: bool
    operator: str = ""


class NodeDrained(Message, frozen=True):
    node: str
    drained: bool
    operator: str = ""


class ScheduleSet(ScheduleRules, frozen=True, kw_only=True, tag=True, tag_field="is"):
    """The rules by which loaders are allocated from now on."""

    operator: str = ""


RequestRecord = ReplicaDrained | NodeDrained | JobAnnotated | ScheduleSet
