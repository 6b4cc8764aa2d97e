"""Jobs that torchLoom starts itself: each a run, made of attempts. The durable part, and the life of a run as a table.

                                           paused
                                              │
    submitted ──> placing ──> starting ──> running ──> done
                     ^            └───────────┤
                     │                        v
                  restarting <──────────── stopping ──> failed, cancelled

A run is in one phase; an attempt is one start of all its ranks. Agents are told what should be, and say what is, until
the two are the same: a weaver that was killed in between goes on from the log and their next beats.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

import msgspec
from msgspec.structs import replace

from torchloom.protocol.ids import RankId, ReplicaId
from torchloom.protocol.incident_records import About, ResponseBegan, ResponseWent
from torchloom.protocol.job import Task
from torchloom.protocol.node import Place, Rollback
from torchloom.protocol.operator import NodeDrained, ReplicaDrained
from torchloom.protocol.phrase import Prose
from torchloom.protocol.records import Record
from torchloom.protocol.run_records import (
    AttemptBegan,
    AttemptEnded,
    AttemptLaunched,
    AttemptNote,
    AttemptPaused,
    AttemptRunning,
    AttemptStopping,
    RunEnded,
    RunSubmitted,
)

LIGHTHOUSE = "lighthouse"
"""What the one among the runs of a torchft job is called in which no rank trains."""
KEEP_NOTES = 50
"""Attempts of one run that are remembered."""
KEEP_STOPS = 1000


class RunPhase(StrEnum):
    SUBMITTED = "submitted"
    PLACING = "placing"
    STARTING = "starting"
    RUNNING = "running"
    PAUSED = "paused"
    STOPPING = "stopping"
    RESTARTING = "restarting"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"


class RunSign(StrEnum):
    """What happens to a run."""

    PLACED = "there is room for all ranks"
    LAUNCHED = "agents were told to start them"
    ALL_RUNNING = "all ranks run"
    HELD = "all ranks are paused"
    GOES_ON = "a rank is paused no longer"
    STOP = "a rank failed, or it is cancelled"
    ALL_GONE = "no process is left, and there is another try"
    ALL_SUCCEEDED = "all ranks ended well"
    GIVEN_UP = "no further try"
    CANCELLED = "cancelled, and nothing is left"


P, S = RunPhase, RunSign
RUN_NEXT: Mapping[tuple[RunPhase, RunSign], RunPhase] = {
    (P.SUBMITTED, S.PLACED): P.PLACING,
    (P.SUBMITTED, S.CANCELLED): P.CANCELLED,
    (P.SUBMITTED, S.GIVEN_UP): P.FAILED,
    (P.PLACING, S.LAUNCHED): P.STARTING,
    (P.PLACING, S.STOP): P.STOPPING,
    (P.STARTING, S.ALL_RUNNING): P.RUNNING,
    (P.STARTING, S.STOP): P.STOPPING,
    (P.STARTING, S.ALL_SUCCEEDED): P.DONE,  # it was over before it was seen to run
    (P.RUNNING, S.STOP): P.STOPPING,
    (P.RUNNING, S.ALL_SUCCEEDED): P.DONE,
    (P.RUNNING, S.HELD): P.PAUSED,
    (P.PAUSED, S.GOES_ON): P.RUNNING,
    (P.PAUSED, S.STOP): P.STOPPING,
    (P.PAUSED, S.ALL_SUCCEEDED): P.DONE,
    (P.STOPPING, S.STOP): P.STOPPING,  # cancelled while it is being stopped
    (P.STOPPING, S.ALL_GONE): P.RESTARTING,
    (P.STOPPING, S.GIVEN_UP): P.FAILED,
    (P.STOPPING, S.ALL_SUCCEEDED): P.DONE,  # what it served is over
    (P.STOPPING, S.CANCELLED): P.CANCELLED,
    (P.RESTARTING, S.PLACED): P.PLACING,
    (P.RESTARTING, S.CANCELLED): P.CANCELLED,
    (P.RESTARTING, S.GIVEN_UP): P.FAILED,
}
OVER = frozenset({P.DONE, P.FAILED, P.CANCELLED})


class Run(msgspec.Struct, frozen=True, kw_only=True):
    job: str
    """What it is called: as its job; one of several replicas as `JOB:NUMBER`."""
    task: Task
    request: str
    phase: RunPhase = RunPhase.SUBMITTED
    since: float = 0.0
    submitted: float = 0.0
    operator: str = ""
    attempt: int = 0
    """Counts on over all runs of a job, so that what is left of an older one is not taken for this one's."""
    before: int = 0
    """Attempts of the runs before this one."""
    places: tuple[Place, ...] = ()
    host: str = ""
    port: int = 0
    resume: str = ""
    resume_step: int | None = None
    then: str = "restart"
    """What follows when all is stopped."""
    wait_until: float = 0.0
    reason: Prose = ""
    notes: tuple[AttemptNote, ...] = ()
    step: int = 0
    """The furthest that was heard of, once it is over."""
    stops: tuple[float, ...] = ()
    """When attempts were stopped to be started again: what the budget of restarts is counted by."""
    deaf: tuple[int, ...] = ()
    """Ranks that are killed rather than asked to end."""
    rollback: Rollback | None = None
    """What the next attempt goes back to."""
    skip: tuple[int, int] | None = None
    """Steps whose batches are left out from now on."""
    response: ResponseBegan | None = None
    """What is being done about an incident; its `do` is what is left."""
    responding: float = 0.0
    """Since when."""
    responses: tuple[tuple[str, float], ...] = ()
    """What was responded to, and when: what the limit of a rule is counted by."""
    drained: bool = False
    """It is to leave at the end of a step, and to stay away."""

    @property
    def over(self) -> bool:
        return self.phase in OVER

    @property
    def of(self) -> ReplicaId:
        """The job and the replica of it whose ranks it starts."""
        return ReplicaId(self.task.part_of or self.job, self.task.replica)

    @property
    def serves(self) -> bool:
        """It is no replica but what the replicas of its job need."""
        return self.task.replica == LIGHTHOUSE

    def rank(self, number: int) -> RankId:
        return RankId(*self.of, number)

    @property
    def world_size(self) -> int:
        """Once it is placed, what there was room for."""
        return len(self.places) or self.task.per_node * self.task.nodes

    @property
    def ordinal(self) -> int:
        """The how-manieth attempt of this run is under way."""
        return self.attempt - self.before

    @property
    def nodes(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(place.node for place in self.places))

    @property
    def note(self) -> AttemptNote:
        """Of the attempt under way, or the last."""
        return self.notes[-1]


class RunsState(msgspec.Struct, frozen=True, kw_only=True):
    runs: tuple[Run, ...] = ()
    drained: tuple[str, ...] = ()


class Runs:
    def __init__(self, state: RunsState | None = None) -> None:
        state = state or RunsState()
        self.by_job = {run.job: run for run in state.runs}
        self._names = {run.of: run.job for run in state.runs}
        self.drained = set(state.drained)

    def state(self) -> RunsState:
        return RunsState(
            runs=tuple(self.by_job[job] for job in sorted(self.by_job)), drained=tuple(sorted(self.drained))
        )

    def active(self, job: str) -> Run | None:
        """The run of a job, while it is under way."""
        run = self.by_job.get(job)
        return run if run is not None and not run.over else None

    def of(self, replica: ReplicaId) -> Run | None:
        """The run that starts the ranks of a replica, while it is under way."""
        name = self._names.get(replica)
        return None if name is None else self.active(name)

    def of_job(self, job: str) -> list[Run]:
        """Those of its runs that are under way: one, or one for each replica and for what they need."""
        return [run for run in self.by_job.values() if run.of.job == job and not run.over]

    def named(self, name: str) -> list[Run]:
        """The run of this name; those of the last submission, if a job is named that has several."""
        mine = [run for run in self.by_job.values() if run.of.job == name]
        if not mine:
            return [self.by_job[name]] if name in self.by_job else []
        last = max(mine, key=lambda run: run.submitted).request
        return sorted((run for run in mine if run.request == last), key=lambda run: run.job)

    def concerned(self, job: str, about: About) -> Run | None:
        """The run that an incident is about, over or not; none if it is about all of a job with several."""
        name = self._names.get(about.rank.of, "") if about.rank is not None else about.run or about.job
        return self.by_job.get(name) or self.by_job.get(job)

    def due(self, node: str | None = None) -> list[str]:
        """Jobs whose run may go on, the oldest first: all of them, or those that the word of a node may concern."""
        runs = sorted((run for run in self.by_job.values() if not run.over), key=lambda run: run.submitted)
        return [run.job for run in runs if node is None or not run.places or node in run.nodes]

    def forget(self, job: str) -> list[str]:
        """A job, with all its replicas; what their runs were called."""
        gone = [run for run in self.by_job.values() if run.of.job == job]
        for run in gone:
            del self.by_job[run.job]
            self._names.pop(run.of, None)
        return [run.job for run in gone]

    # ── fold ──

    def fold(self, record: Record, at: float) -> None:
        match record:
            case RunSubmitted(job=job, task=task, request=request, operator=operator):
                last = self.by_job[job].attempt if job in self.by_job else 0
                run = Run(job=job, task=task, request=request, operator=operator, since=at, submitted=at)
                self.by_job[job] = replace(run, attempt=last, before=last)
                self._names[run.of] = job
            case AttemptBegan(job=job, attempt=attempt, places=places):
                run = self._turn(job, S.PLACED, at)
                notes = (*run.notes, AttemptNote(number=attempt - run.before, began=at))[-KEEP_NOTES:]
                # A lighthouse stays where it was: replicas know no other.
                host, port = (run.host, run.port) if run.serves else ("", 0)
                self.by_job[job] = replace(
                    run, attempt=attempt, places=places, notes=notes, host=host, port=port, resume="", resume_step=None
                )
            case AttemptLaunched(job=job, host=host, port=port, resume=resume, resume_step=resume_step):
                run = self._turn(job, S.LAUNCHED, at)
                self.by_job[job] = replace(
                    run, host=host, port=port, resume=resume, resume_step=resume_step, rollback=None
                )
                self._note(job, resume_step=resume_step, heals=record.heals)
            case AttemptRunning(job=job, warm=warm, why_cold=why_cold):
                self._turn(job, S.ALL_RUNNING, at)
                self._note(job, running=at, warm=warm, why_cold=why_cold)
            case AttemptPaused(job=job, held=held):
                self._turn(job, S.HELD if held else S.GOES_ON, at)
            case AttemptStopping(
                job=job, reason=reason, failure=failure, step=step, then=then, code=code, counts=counts
            ):
                run = self._turn(job, S.STOP, at)
                stops = (*run.stops, at)[-KEEP_STOPS:] if then == "restart" and counts else run.stops
                back = record.rollback
                skip = back.skip if back is not None and back.skip is not None else run.skip
                self.by_job[job] = replace(
                    run,
                    then=then,
                    reason=reason,
                    stops=stops,
                    deaf=record.deaf,
                    rollback=back or run.rollback,
                    skip=skip,
                    response=None,
                )
                self._note(
                    job,
                    stopping=at,
                    reason=reason,
                    kind=record.kind or "",
                    failure=failure,
                    incident=record.incident,
                    step=step,
                    code=code,
                )
            case ResponseBegan(job=job, kind=kind):
                run = self.by_job[job]
                responses = (*run.responses, (kind, at))[-KEEP_STOPS:]
                self.by_job[job] = replace(run, response=record, responding=at, responses=responses)
            case ResponseWent(job=job, left=left):
                run = self.by_job[job]
                rest = replace(run.response, do=left) if run.response is not None and left else None
                self.by_job[job] = replace(run, response=rest)
            case AttemptEnded(job=job, wait_seconds=wait_seconds):
                run = self._turn(job, S.ALL_GONE, at)
                self.by_job[job] = replace(run, wait_until=at + wait_seconds)
                self._note(job, ended=at)
            case RunEnded(job=job, phase=phase, reason=reason, step=step):
                sign = {"done": S.ALL_SUCCEEDED, "failed": S.GIVEN_UP, "cancelled": S.CANCELLED}[phase]
                run = self._turn(job, sign, at)
                self.by_job[job] = replace(run, reason=reason, step=step)
                if run.notes:
                    self._note(job, ended=at)
            case ReplicaDrained(job=job, drained=drained):
                self.by_job[job] = replace(self.by_job[job], drained=drained)
            case NodeDrained(node=node, drained=drained):
                (self.drained.add if drained else self.drained.discard)(node)

    def _turn(self, job: str, sign: RunSign, at: float) -> Run:
        run = self.by_job[job]
        self.by_job[job] = run = replace(run, phase=RUN_NEXT[(run.phase, sign)], since=at)
        return run

    def _note(self, job: str, **known: object) -> None:
        run = self.by_job[job]
        self.by_job[job] = replace(run, notes=(*run.notes[:-1], replace(run.note, **known)))
