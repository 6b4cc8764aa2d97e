"""Goodput: every second since a run arrived is productive, or lost for a cause. It arrives when it is submitted, unless
it is to start later or after another job.

    waiting     there was no room for its ranks
    starting    an attempt that nothing had gone wrong before, until all its ranks ran; and of every attempt what its
                ranks did before their first step (imports, loading), or all of it if no step was made
    a kind      of incident (hang, crash, device, …; `node` where a node or its agent was lost): from its first sign, or
                from the end of the attempt, until all ranks ran again
    redone      ranks ran, but what they did was not in the checkpoint from which the next attempt resumed
    paused      all ranks were, or it was released
    moving      an attempt was ended because its node was leaving
    ending      an operator had requested the end

The rest is productive. Each second goes to exactly one cause, so the sum is always all of it. What is redone is counted
in steps: the steps of an attempt are assumed to be equally long. Of ranks that never
join only the step from which the next attempt resumes is known: their time counts as starting while they run, and
afterwards as productive, unless that step or the failure of the run shows otherwise.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec
from msgspec.structs import replace

from torchloom.core.detect.kinds_and_responses import HANGS
from torchloom.protocol import run_records
from torchloom.protocol.rank import JobResumed
from torchloom.protocol.records import IncidentAmended, IncidentOpened, RankJoined, Record
from torchloom.protocol.views import Goodput

RUNNING, BETWEEN = "running", "between"
"""No loss; and time that is divided between the cause of a restart and waiting for room."""
WAITING, STARTING, PAUSED, REDONE, MOVING, ENDING, OTHER = (
    "waiting", "starting", "paused", "redone", "moving", "ending", "other",
)  # fmt: skip
NODE = "node"
KEEP_STRETCHES = 64


class Stretch(NamedTuple):
    """Time in which an attempt ran, and from which step to which it came."""

    first: int
    last: int
    seconds: float

    @property
    def steps(self) -> int:
        return self.last - self.first

    def up_to(self, step: int) -> Stretch:
        """What is left of it if only the steps up to this one count."""
        if step > self.first and step >= self.last:
            return self if self.steps else Stretch(self.first, step, self.seconds)  # it came so far, then
        if step <= self.first:
            return Stretch(self.first, self.first, 0.0)
        share = (step - self.first) / self.steps
        return Stretch(self.first, step, self.seconds * share)


class Account(msgspec.Struct, frozen=True, kw_only=True):
    """Where the time of one run went."""

    job: str
    submitted: float
    """When it arrived: since then its time counts."""
    since: float
    """The time up to which it is accounted for."""
    doing: str = WAITING
    """The cause that gets the time from then on."""
    cause: str = ""
    """Why its ranks have to be restarted."""
    until: float = 0.0
    """The pause before the next attempt, which is part of the cause."""
    first: int = 0
    """The step that the attempt under way began with."""
    joined: bool = False
    """A rank of it has joined, so its steps are known."""
    stepped: bool = False
    """Its first step is known to be made, and what was before it is not counted as running."""
    running: float = 0.0
    """Seconds in which it ran."""
    latest: float = 0.0
    """Those of them at the end of an attempt in which it ran without a break."""
    standing: str = ""
    """The incident because of which no step is made."""
    stretches: tuple[Stretch, ...] = ()
    """Of the attempts before, without what was lost."""
    whole: tuple[Stretch, ...] = ()
    """The same with what was lost when the attempt under way began: its ranks may report that it was less."""
    lost: dict[str, float] = {}
    ended: float | None = None


class Accounts(dict[str, Account]):
    """By run."""

    def of(self, job: str, now: float, step: int | None = None) -> Goodput | None:
        """Where its time went; `step` is how far the attempt under way is known to be."""
        account = self.get(job)
        if account is None:
            return None
        if account.ended is None:
            account = _charged(account, now)
            if step is not None and step <= account.first:
                account = _not_begun(account)
        productive = sum(stretch.seconds for stretch in account.stretches) + account.running
        lost = {cause: seconds for cause, seconds in sorted(account.lost.items()) if seconds > 0}
        return Goodput(elapsed=account.since - account.submitted, productive=productive, lost=lost)

    def blame(self, job: str, kind: str, opened: float, at: float) -> None:
        """The attempt of this job that was just ended was ended for an incident."""
        account = self.get(job)
        if account is None or account.doing == ENDING or (account.doing == MOVING and kind == NODE):
            return
        if kind == "crash" and account.stretches:  # a dead rank made no steps, even if it took a while to be sure
            idle = max(0.0, min(at - opened, account.latest))
            last = account.stretches[-1]
            stretches = (*account.stretches[:-1], last._replace(seconds=last.seconds - idle))
            account = replace(account, stretches=stretches, lost=_plus(account.lost, kind, idle), latest=0.0)
        self[job] = replace(account, doing=kind, cause=kind)

    def fold(self, record: Record, at: float, job: str) -> None:
        """`job` is the name of the run that the record concerns."""
        if isinstance(record, run_records.RunSubmitted) and (record.task.delay or record.task.after):
            self.pop(record.job, None)  # of an earlier run of this name
            return
        if isinstance(record, run_records.RunSubmitted | run_records.RunArrived):
            self[record.job] = Account(job=record.job, submitted=at, since=at)
            return
        if isinstance(record, IncidentAmended) and record.closed:
            job = next((a.job for a in self.values() if a.standing == record.id), "")
        account = self.get(job)
        if account is not None and account.ended is None:
            self[job] = _folded(account, record, at)


def _folded(account: Account, record: Record, at: float) -> Account:
    match record:
        case run_records.AttemptBegan():
            account = _charged(account, at)
            return replace(account, doing=account.cause or STARTING, joined=False, stepped=False)
        case run_records.AttemptLaunched(heals=True):
            return replace(account, whole=(), first=max((stretch.last for stretch in account.stretches), default=0))
        case run_records.AttemptLaunched(resume_step=step):
            whole = account.stretches
            return replace(_redone(replace(account, whole=whole), whole, step or 0), first=step or 0)
        case JobResumed(step=step) if step > account.first:
            left = tuple(stretch.up_to(account.first) for stretch in account.whole)
            return replace(_redone(account, left, step), first=step)
        case run_records.AttemptRunning():
            return replace(_charged(account, at), doing=RUNNING, cause="")
        case RankJoined() if not account.joined:
            account = _charged(account, at)
            return replace(_not_begun(account), joined=True)
        case run_records.AttemptStepped(seconds=seconds):
            account = _charged(account, at)
            training = min(seconds, account.running)
            before = _not_begun(replace(account, running=account.running - training))
            return replace(before, running=training, stepped=True)
        case run_records.AttemptPaused(held=held):
            return replace(_charged(account, at), doing=PAUSED if held else RUNNING)
        case IncidentOpened(id=id, kind=kind) if kind in HANGS and account.doing == RUNNING:
            return replace(_charged(account, at), doing=kind, standing=id)
        case IncidentAmended() if account.doing in HANGS:
            return replace(_charged(account, at), doing=RUNNING, standing="")
        case run_records.AttemptStopping():
            return _stopping(account, record, at)
        case run_records.AttemptReleased():
            return replace(_charged(account, at), doing=PAUSED)
        case run_records.RunResumed():
            return replace(_charged(account, at), doing=WAITING)
        case run_records.AttemptEnded(wait_seconds=wait):
            return replace(_charged(account, at), doing=BETWEEN, until=at + wait)
        case run_records.RunEnded(step=step, phase=phase):
            account = _with_stretch(_charged(account, at), step)
            return replace(_without_stepless(account) if phase == "failed" else account, ended=at)
    return account


def _stopping(account: Account, record: run_records.AttemptStopping, at: float) -> Account:
    doing, before = account.doing, account.since
    account = _with_stretch(_charged(account, at), record.step)
    stepless = account.joined and record.step <= account.first  # then it left no stretch
    latest = max(0.0, at - before) if doing == RUNNING and not stepless else 0.0
    cause = doing if doing in HANGS else OTHER if record.counts else MOVING
    cause = ENDING if record.next_action == "cancel" else cause
    if record.next_action == "release":
        return replace(account, doing=PAUSED, cause="", latest=0.0, standing="", whole=())
    return replace(account, doing=cause, cause=cause, latest=latest, standing="", whole=())


def _charged(account: Account, at: float) -> Account:
    """Account for the time up to now. A clock that goes back adds nothing."""
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
    if account.joined and step <= account.first:
        return _not_begun(account)
    if not account.running:
        return account
    stretches = (*account.stretches, Stretch(account.first, max(step, account.first), account.running))
    while len(stretches) > KEEP_STRETCHES:
        one, two, *rest = stretches
        stretches = (Stretch(min(one.first, two.first), max(one.last, two.last), one.seconds + two.seconds), *rest)
    return replace(account, stretches=stretches, running=0.0)


def _not_begun(account: Account) -> Account:
    """What the attempt under way has run up to now was no training yet."""
    return replace(account, running=0.0, lost=_plus(account.lost, STARTING, account.running))


def _without_stepless(account: Account) -> Account:
    """Without the last stretch if no step was made in it, as far as anybody knows."""
    if not account.stretches or account.stretches[-1].steps:
        return account
    *before, last = account.stretches
    return replace(account, stretches=tuple(before), lost=_plus(account.lost, STARTING, last.seconds))


def _redone(account: Account, before: tuple[Stretch, ...], step: int) -> Account:
    """Only what was done up to this step is left of the whole; `before` was left of it up to now."""
    if not account.whole:
        return account
    kept = tuple(stretch.up_to(step) for stretch in account.whole)
    lost = account.lost
    for whole, one, other in zip(account.whole, before, kept, strict=True):
        lost = _plus(lost, REDONE if whole.steps else STARTING, one.seconds - other.seconds)
    left = tuple(stretch for stretch in kept if stretch.seconds > 0)
    return replace(account, stretches=left, lost=lost)


def _plus(lost: dict[str, float], cause: str, seconds: float) -> dict[str, float]:
    return {**lost, cause: max(0.0, lost.get(cause, 0.0) + seconds)} if seconds else lost
