"""What became of a run's time: every second since it was submitted is productive, or lost for a cause.

    waiting     there was no room for its ranks
    starting    an attempt that nothing had gone wrong before, until all its ranks ran
    a kind      of incident (hang, crash, device, …; `node` where a node or its agent was lost): from its first sign, or
                from the end of the attempt, until all ranks ran again
    redone      ranks ran, but what they did was not in the checkpoint from which the next attempt went on
    paused      all ranks were
    moving      an attempt was ended because its node was leaving
    ending      somebody had asked for the end

The rest is productive. Time goes to one account after the other, so the sum is always all of it. What is redone is told
by steps: those of an attempt are taken to have been equally long.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec
from msgspec.structs import replace

from torchloom.messages import (
    AttemptBegan,
    AttemptEnded,
    AttemptHeld,
    AttemptLaunched,
    AttemptRunning,
    AttemptStopping,
    Goodput,
    IncidentAmended,
    IncidentOpened,
    JobResumed,
    Record,
    RunEnded,
    RunSubmitted,
)

RUNNING, BETWEEN = "running", "between"
"""What is no loss, and what is divided between the cause of a restart and waiting for room."""
WAITING, STARTING, PAUSED, REDONE, MOVING, ENDING, OTHER = (
    "waiting", "starting", "paused", "redone", "moving", "ending", "other",
)  # fmt: skip
NODE = "node"
STANDSTILL = frozenset({"hang", "frozen", "held"})
"""Kinds of incidents in which no step is made while they last."""
KEEP_STRETCHES = 64


class Stretch(NamedTuple):
    """Time in which an attempt ran, and from which step to which it came."""

    first: int
    last: int
    seconds: float

    def up_to(self, step: int) -> Stretch:
        """What is left of it if only the steps up to this one count."""
        if step > self.first and step >= self.last:
            return self
        if step <= self.first:
            return Stretch(self.first, self.first, 0.0)
        share = (step - self.first) / (self.last - self.first)
        return Stretch(self.first, step, self.seconds * share)


class Account(msgspec.Struct, frozen=True, kw_only=True):
    """Where the time of one run went."""

    job: str
    submitted: float
    since: float
    """Up to here it is accounted for."""
    doing: str = WAITING
    """Where the time from then on goes."""
    cause: str = ""
    """Why its ranks have to be started again."""
    until: float = 0.0
    """The pause before the next attempt, which is part of the cause."""
    first: int = 0
    """The step that the attempt under way began with."""
    running: float = 0.0
    """Seconds in which it ran."""
    latest: float = 0.0
    """Those of them at the end of an attempt in which it ran without a break."""
    standing: str = ""
    """The incident because of which no step is made."""
    stretches: tuple[Stretch, ...] = ()
    """Of the attempts before, without what was lost."""
    whole: tuple[Stretch, ...] = ()
    """The same with what was lost when the attempt under way began: it may say itself that it was less."""
    lost: dict[str, float] = {}
    ended: float | None = None


class Accounts:
    def __init__(self, accounts: tuple[Account, ...] = ()) -> None:
        self.by_job = {account.job: account for account in accounts}

    def state(self) -> tuple[Account, ...]:
        return tuple(self.by_job[job] for job in sorted(self.by_job))

    def forget(self, job: str) -> None:
        self.by_job.pop(job, None)

    def of(self, job: str, now: float) -> Goodput | None:
        account = self.by_job.get(job)
        return None if account is None else tally(account, now)

    def blame(self, job: str, kind: str, opened: float, at: float) -> None:
        """The attempt of this job that was just ended was ended for an incident."""
        account = self.by_job.get(job)
        if account is None or account.doing == ENDING or (account.doing == MOVING and kind == NODE):
            return
        if kind == "crash" and account.stretches:  # a dead rank made no steps, even if it took a while to be sure
            idle = max(0.0, min(at - opened, account.latest))
            last = account.stretches[-1]
            stretches = (*account.stretches[:-1], last._replace(seconds=last.seconds - idle))
            account = replace(account, stretches=stretches, lost=_plus(account.lost, kind, idle), latest=0.0)
        self.by_job[job] = replace(account, doing=kind, cause=kind)

    def fold(self, record: Record, at: float) -> None:
        if isinstance(record, RunSubmitted):
            self.by_job[record.job] = Account(job=record.job, submitted=at, since=at)
            return
        job = record.rank.job if isinstance(record, JobResumed) else getattr(record, "job", "")
        if isinstance(record, IncidentAmended) and record.closed:
            job = next((a.job for a in self.by_job.values() if a.standing == record.id), "")
        account = self.by_job.get(job)
        if account is not None and account.ended is None:
            self.by_job[job] = _folded(account, record, at)


def tally(account: Account, now: float) -> Goodput:
    """The account closed for the moment."""
    if account.ended is None:
        account = _charged(account, now)
    productive = sum(stretch.seconds for stretch in account.stretches) + account.running
    lost = {cause: seconds for cause, seconds in sorted(account.lost.items()) if seconds > 0}
    return Goodput(elapsed=account.since - account.submitted, productive=productive, lost=lost)


def _folded(account: Account, record: Record, at: float) -> Account:
    match record:
        case AttemptBegan():
            account = _charged(account, at)
            return replace(account, doing=account.cause or STARTING)
        case AttemptLaunched(resume_step=step):
            return replace(_redone(replace(account, whole=account.stretches), step or 0), first=step or 0)
        case JobResumed(step=step) if step > account.first:
            return replace(_redone(account, step) if account.whole else account, first=step)
        case AttemptRunning():
            return replace(_charged(account, at), doing=RUNNING, cause="")
        case AttemptHeld(held=held):
            return replace(_charged(account, at), doing=PAUSED if held else RUNNING)
        case IncidentOpened(id=id, kind=kind) if kind in STANDSTILL and account.doing == RUNNING:
            return replace(_charged(account, at), doing=kind, standing=id)
        case IncidentAmended() if account.doing in STANDSTILL:
            return replace(_charged(account, at), doing=RUNNING, standing="")
        case AttemptStopping():
            return _stopping(account, record, at)
        case AttemptEnded(wait_seconds=wait):
            return replace(_charged(account, at), doing=BETWEEN, until=at + wait)
        case RunEnded(step=step):
            return replace(_with_stretch(_charged(account, at), step), ended=at)
    return account


def _stopping(account: Account, record: AttemptStopping, at: float) -> Account:
    doing, before = account.doing, account.since
    account = _with_stretch(_charged(account, at), record.step)
    latest = max(0.0, at - before) if doing == RUNNING else 0.0
    cause = doing if doing in STANDSTILL else OTHER if record.counts else MOVING
    cause = ENDING if record.then == "cancel" else cause
    return replace(account, doing=cause, cause=cause, latest=latest, standing="", whole=())


def _charged(account: Account, at: float) -> Account:
    """With the time up to now in its place. A clock that goes back adds nothing."""
    at = max(at, account.since)
    seconds = at - account.since
    match account.doing:
        case "running":
            return replace(account, since=at, running=account.running + seconds)
        case "between":
            own = max(0.0, min(at, account.until) - account.since)
            lost = _plus(_plus(account.lost, account.cause or OTHER, own), WAITING, seconds - own)
            return replace(account, since=at, lost=lost)
    return replace(account, since=at, lost=_plus(account.lost, account.doing, seconds))


def _with_stretch(account: Account, step: int) -> Account:
    """What the attempt under way has run, put to what was run before."""
    if not account.running:
        return account
    stretches = (*account.stretches, Stretch(account.first, max(step, account.first), account.running))
    while len(stretches) > KEEP_STRETCHES:
        one, two, *rest = stretches
        stretches = (Stretch(min(one.first, two.first), max(one.last, two.last), one.seconds + two.seconds), *rest)
    return replace(account, stretches=stretches, running=0.0)


def _redone(account: Account, step: int) -> Account:
    """Only what was done up to this step is left."""
    kept = tuple(stretch.up_to(step) for stretch in account.whole)
    before, after = (sum(stretch.seconds for stretch in some) for some in (account.stretches, kept))
    left = tuple(stretch for stretch in kept if stretch.seconds > 0)
    return replace(account, stretches=left, lost=_plus(account.lost, REDONE, before - after))


def _plus(lost: dict[str, float], cause: str, seconds: float) -> dict[str, float]:
    return {**lost, cause: max(0.0, lost.get(cause, 0.0) + seconds)} if seconds else lost
