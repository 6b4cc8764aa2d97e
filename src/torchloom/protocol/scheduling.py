"""Loader scheduling: its rules, what the log has of it, and what viewers see of it."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from torchloom.protocol.ids import Name
from torchloom.protocol.message import Message, Part

PolicyName = Literal["ours", "even", "requested", "torchloader", "off"]
"""Who decides how many loaders the ranks of each job have; `off`: their scripts."""
ObjectiveName = Literal["share", "samples", "log", "makespan"]
"""What the policy `ours` maximises (core/scheduling/cluster_loaders.py)."""
LoaderCount = Annotated[int, Meta(ge=0, le=100_000)]
Budgets = Annotated[dict[Name, LoaderCount], Meta(max_length=10_000)]
Trigger = Literal["arrival", "departure", "paused", "limits", "budget", "measured", "drift", "rules", "again"]
"""Why loaders are allocated: jobs arrived or continued, left, were paused; their limits or a node's budget changed; a
job was measured for the first time; measurements changed; an operator changed the rules; a resize did not succeed."""
JobStanding = Literal["scheduled", "unmeasured", "pinned", "paused", "no_loaders", "no_budget"]
"""Its loaders are allocated, by its measured curve or by the prior; an operator has set them; training is paused; it
has no ElasticLoader; it runs on a node whose budget nobody knows."""


class ScheduleRules(Part, frozen=True):
    """By which rules loaders are allocated."""

    policy: PolicyName = "off"
    objective: ObjectiveName = "share"
    budgets: Budgets = {}
    """Of nodes, where an operator has set them. They take the place of what agents say."""


class LoaderMove(Part, frozen=True):
    """The ranks of a job are to have another number of loaders each."""

    job: Name
    before: int
    loaders: int


class LoadersAllocated(Message, frozen=True):
    """A decision about loaders. The moves follow as changes of the knob `loaders`, those that shrink first."""

    policy: PolicyName
    triggers: tuple[Trigger, ...]
    moves: tuple[LoaderMove, ...]
    gain: float | None = None
    """Predicted, of the objective of the jobs that move; absent where nothing else was possible."""
    about: tuple[str, ...] = ()
    """The jobs and nodes where the triggers were, the first few."""


# ── queries and views ──


class QuerySchedule(Message, frozen=True):
    """Which loaders each job has, and why."""


class QueryPrediction(Message, frozen=True):
    """What a job would train at with other numbers of loaders."""

    job: Name


class NodeBudget(Part, frozen=True):
    node: str
    budget: int | None
    """Absent where nobody knows it: the node has no agent."""
    used: int
    """Loaders that jobs have there, and are about to get."""
    is_set: bool = False
    """By an operator."""


class Throughput(Part, frozen=True):
    """Of a whole job, in samples/s."""

    loaders: int
    """Of each rank."""
    predicted: float
    error: float
    """Standard error of the prediction."""
    measured: float | None = None
    """The median where this number was tried."""
    share: float = 0.0
    """Predicted, of the throughput without waiting for data."""


class ScheduledJob(Part, frozen=True, kw_only=True):
    job: str
    standing: JobStanding
    ranks: dict[str, int]
    """On each node."""
    loaders: int | None = None
    """Of each rank; absent without an ElasticLoader."""
    target: int | None = None
    """What it is about to get, if that differs."""
    requested: int | None = None
    """What its script asked for."""
    least: int = 0
    most: int | None = None
    weight: float = 1.0
    now: Throughput | None = None
    """With the present loaders; absent before it was measured."""
    ours: int | None = None
    """What the policy `ours` would give it, where another one is in force."""


class ScheduleScores(Part, frozen=True):
    """All objectives for the present allocation."""

    share: float
    samples: float
    log: float
    makespan: float | None = None
    """Seconds until the last of the jobs has ended of which the number of samples is known; absent if it is of none."""


class PastAllocation(Part, frozen=True):
    at: float
    record: LoadersAllocated


class ScheduleView(Message, frozen=True):
    rules: ScheduleRules
    now: float
    jobs: tuple[ScheduledJob, ...] = ()
    nodes: tuple[NodeBudget, ...] = ()
    scores: ScheduleScores | None = None
    """Absent without a job that is measured."""
    past: tuple[PastAllocation, ...] = ()
    """The latest, oldest first; since this weaver began."""


class PredictionView(Message, frozen=True):
    job: ScheduledJob
    curve: tuple[Throughput, ...] = ()
    """For 0, 1, 2 … loaders; empty before the first measurement."""
    rate: float = 0.0
    """Samples/s that one loader gives a rank."""
    contention: float = 0.0
    """How much longer each further loader makes the work of all."""
    ceiling: float = 0.0
    """Samples/s that training could take on a rank."""
