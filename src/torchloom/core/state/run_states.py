"""Runs: the jobs that torchLoom starts itself, made of attempts. The durable part, with the phases as a table.

                                           paused
                                              │
    submitted ──> placing ──> starting ──> running ──> done
                     ^            └───────────┤
                     │                        v
                  restarting <──────────── stopping ──> failed, cancelled
                     ^                        │
                     └────── released <───────┘

A run is in one phase; an attempt is one start of all its ranks. Agents receive the desired state and report the actual
one until both agree. A weaver that was killed in between continues from the log and their next beats.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from enum import StrEnum

from msgspec.structs import replace

from torchloom.protocol import run_records
from torchloom.protocol.ids import RankId, ReplicaId
from torchloom.protocol.node import Rollback
from torchloom.protocol.operator import NodeDrained, ReplicaDrained
from torchloom.protocol.phrase import Prose
from torchloom.protocol.records import About
from torchloom.protocol.run_records import AttemptNote, RunDescription

LIGHTHOUSE = "lighthouse"
"""Replica name of the run of a torchft job that starts the lighthouse."""
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
    RELEASED = "released"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"


class RunSign(StrEnum):
    """What happens to a run."""

    PLACED = "there is room for all ranks"
    LAUNCHED = "agents start them"
    ALL_RUNNING = "all ranks run"
    HELD = "all ranks are paused"
    GOES_ON = "a rank is paused no longer"
    STOP = "a rank failed, or it is cancelled"
    ALL_GONE = "no process is left, and there is another try"
    SAVED_AND_GONE = "it is saved and no process is left, until it is resumed"
    RESUMED = "it is resumed"
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
    (P.STOPPING, S.SAVED_AND_GONE): P.RELEASED,
    (P.STOPPING, S.GIVEN_UP): P.FAILED,
    (P.STOPPING, S.ALL_SUCCEEDED): P.DONE,  # what it served is over
    (P.STOPPING, S.CANCELLED): P.CANCELLED,
    (P.RESTARTING, S.PLACED): P.PLACING,
    (P.RESTARTING, S.CANCELLED): P.CANCELLED,
    (P.RESTARTING, S.GIVEN_UP): P.FAILED,
    (P.RELEASED, S.RESUMED): P.RESTARTING,
    (P.RELEASED, S.CANCELLED): P.CANCELLED,
    (P.RELEASED, S.GIVEN_UP): P.FAILED,
}
OVER = frozenset({P.DONE, P.FAILED, P.CANCELLED})
UNDER_WAY = frozenset({P.PLACING, P.STARTING, P.RUNNING, P.PAUSED})
"""Phases in which an attempt needs its nodes."""


class Run(RunDescription, frozen=True, kw_only=True):
    name: str
    """The name of the job; of one of several replicas `JOB:NUMBER`."""
    request: str
    phase: RunPhase = RunPhase.SUBMITTED
    attempt: int = 0
    """Counted over all runs of a job, so that processes of an older run are not taken for this one's."""
    before: int = 0
    """Attempts of the runs before this one."""
    host: str = ""
    port: int = 0
    next_action: str = "restart"
    """What follows when all ranks have stopped."""
    wait_until: float = 0.0
    reason: Prose = ""
    stops: tuple[float, ...] = ()
    """When attempts were stopped to be restarted: `max_restarts` counts these."""
    kill_now: tuple[int, ...] = ()
    """Ranks that are killed at once."""
    rollback: Rollback | None = None
    """The checkpoint that the next attempt goes back to."""
    skip: tuple[int, int] | None = None
    """Steps whose batches are skipped from now on."""
    response: run_records.ResponseBegan | None = None
    """The response under way; its `do` has the remaining actions."""
    responding: float = 0.0
    """Since when, if there is one."""
    responses: tuple[tuple[str, float], ...] = ()
    """Kinds of incidents and when a response began: the limits of rules count these."""
    release: run_records.ReleaseBegan | None = None
    """It is saved, to be released afterwards."""
    releasing: float = 0.0
    """Since when, if it is."""
    makes_room_for: str = ""
    """The run for which it is, or was last, released; empty if an operator released it."""
    displaced: float = 0.0
    """When it was last released for another run."""
    resumed: str = ""
    """The last request to resume it after it was released."""
    drained: bool = False
    """It leaves at the end of a step, and is not restarted until the drain is undone."""

    @property
    def over(self) -> bool:
        return self.phase in OVER

    @property
    def under_way(self) -> bool:
        """Whether an attempt is, and is not being stopped."""
        return self.phase in UNDER_WAY

    @property
    def replica_id(self) -> ReplicaId:
        """The replica whose ranks it starts."""
        return ReplicaId(self.task.part_of or self.name, self.task.replica)

    @property
    def is_lighthouse(self) -> bool:
        """It starts the lighthouse of its job, and no replica."""
        return self.task.replica == LIGHTHOUSE

    def rank(self, number: int) -> RankId:
        return RankId(*self.replica_id, number)

    @property
    def world_size(self) -> int:
        """The number of ranks; once it is placed, those that there was room for."""
        return len(self.places) or self.task.world_size

    @property
    def waits(self) -> bool:
        """Whether it starts as soon as there is room."""
        return bool(self.arrived) and self.phase in {P.SUBMITTED, P.RESTARTING}

    @property
    def is_being_released(self) -> bool:
        return self.release is not None or (self.phase is P.STOPPING and self.next_action == "release")

    @property
    def urgency(self) -> tuple[float, float, float]:
        """The order in which runs are placed: priority, then deadline, then age; the least comes first."""
        deadline = self.arrived + self.task.deadline if self.arrived and self.task.deadline else math.inf
        return -self.task.priority, deadline, self.submitted

    @property
    def ordinal(self) -> int:
        """The number of the attempt within this run."""
        return self.attempt - self.before

    @property
    def nodes(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(place.node for place in self.places))

    @property
    def note(self) -> AttemptNote:
        """The note of the attempt under way, or of the last one."""
        return self.notes[-1]


class Runs:
    def __init__(self, runs: Iterable[Run] = (), drained: Iterable[str] = ()) -> None:
        self.by_name = {run.name: run for run in runs}
        self._names = {run.replica_id: run.name for run in self.by_name.values()}
        self.drained = set(drained)
        """Nodes on which nothing more is started."""

    def active(self, job: str) -> Run | None:
        """The run of a job, while it is under way."""
        run = self.by_name.get(job)
        return run if run is not None and not run.over else None

    def of(self, replica: ReplicaId) -> Run | None:
        """The run that starts the ranks of a replica, while it is under way."""
        name = self._names.get(replica)
        return None if name is None else self.active(name)

    def of_job(self, job: str) -> list[Run]:
        """Its runs that are not over: one, or one for each replica and for the lighthouse."""
        return [run for run in self.by_name.values() if run.replica_id.job == job and not run.over]

    def named(self, name: str) -> list[Run]:
        """The run of this name; those of the last submission, if a job is named that has several."""
        mine = [run for run in self.by_name.values() if run.replica_id.job == name]
        if not mine:
            return [self.by_name[name]] if name in self.by_name else []
        last = max(mine, key=lambda run: run.submitted).request
        return sorted((run for run in mine if run.request == last), key=lambda run: run.name)

    def concerned(self, job: str, about: About) -> Run | None:
        """The run that an incident is about, over or not; None if it is about a job with several runs."""
        name = self._names.get(about.rank.replica_id, "") if about.rank is not None else about.run or about.job
        return self.by_name.get(name) or self.by_name.get(job)

    def due(self, node: str | None = None) -> list[str]:
        """Names of runs that may advance, the most urgent first: all, or those that a beat of a node may concern."""
        runs = sorted((run for run in self.by_name.values() if not run.over), key=lambda run: run.urgency)
        return [run.name for run in runs if node is None or not run.places or node in run.nodes]

    def forget(self, job: str) -> list[str]:
        """Forget all runs of a job; returns their names."""
        gone = [run for run in self.by_name.values() if run.replica_id.job == job]
        for run in gone:
            del self.by_name[run.name]
            self._names.pop(run.replica_id, None)
        return [run.name for run in gone]

    # ── fold ──

    def fold(self, record: run_records.RunRecord | ReplicaDrained | NodeDrained, at: float) -> None:
        match record:
            case run_records.RunSubmitted():
                self._submit(record, at)
            case run_records.RunArrived(job=job):
                self._modify(job, arrived=at)
            case run_records.AttemptBegan(job=job, attempt=attempt, places=places):
                run = self.by_name[job]
                notes = (*run.notes, AttemptNote(number=attempt - run.before, began=at))[-KEEP_NOTES:]
                # A lighthouse stays where it was: replicas know no other.
                host, port = (run.host, run.port) if run.is_lighthouse else ("", 0)
                self._turn(job, S.PLACED, at, attempt=attempt, places=places, notes=notes, host=host, port=port)
                self._modify(job, resume="", resume_step=None, rejected={})
            case run_records.AttemptLaunched(job=job, host=host, port=port, resume=resume, resume_step=step):
                self._turn(job, S.LAUNCHED, at, host=host, port=port, resume=resume, resume_step=step, rollback=None)
                self._modify(job, rejected=record.rejected)
                self._note(record)
            case run_records.AttemptRunning(job=job):
                self._turn(job, S.ALL_RUNNING, at)
                self._note(record, running=at)
            case run_records.AttemptPaused(job=job, held=held):
                self._turn(job, S.HELD if held else S.GOES_ON, at)
            case run_records.AttemptStopping(job=job, reason=reason, next_action=next_action, rollback=back):
                run = self._turn(job, S.STOP, at, next_action=next_action, reason=reason, kill_now=record.kill_now)
                if next_action == "restart" and record.counts:
                    self._modify(job, stops=(*run.stops, at)[-KEEP_STOPS:])
                skip = back.skip if back is not None and back.skip is not None else run.skip
                self._modify(job, rollback=back or run.rollback, skip=skip, response=None)
                if next_action != "restart":
                    self._modify(job, release=None)
                self._note(record, stopping=at, kind=record.kind or "")
            case run_records.ResponseBegan(job=job, kind=kind):
                responses = (*self.by_name[job].responses, (kind, at))[-KEEP_STOPS:]
                self._modify(job, response=record, responding=at, responses=responses)
            case run_records.ResponseWent(job=job, left=left):
                response = self.by_name[job].response
                self._modify(job, response=replace(response, do=left) if response is not None and left else None)
            case run_records.AttemptEnded(job=job, wait_seconds=wait_seconds):
                self._turn(job, S.ALL_GONE, at, wait_until=at + wait_seconds)
                self._note(record, ended=at)
            case (
                run_records.AttemptReleased()
                | run_records.ReleaseBegan()
                | run_records.ReleaseEnded()
                | run_records.RunResumed()
            ):
                self._fold_release(record, at)
            case run_records.RunEnded(job=job, phase=phase, reason=reason, step=step):
                sign = {"done": S.ALL_SUCCEEDED, "failed": S.GIVEN_UP, "cancelled": S.CANCELLED}[phase]
                run = self._turn(job, sign, at, reason=reason, step=step)
                if run.notes:
                    self._modify(job, notes=(*run.notes[:-1], replace(run.note, ended=at)))
            case ReplicaDrained(job=job, drained=drained):
                self._modify(job, drained=drained)
            case NodeDrained(node=node, drained=drained):
                (self.drained.add if drained else self.drained.discard)(node)

    def _submit(self, record: run_records.RunSubmitted, at: float) -> None:
        name = record.job
        last = self.by_name[name].attempt if name in self.by_name else 0
        arrived = 0.0 if record.task.delay or record.task.after else at
        run = Run.from_fields(record, name=name, since=at, submitted=at, attempt=last, before=last, arrived=arrived)
        self.by_name[name] = run
        self._names[run.replica_id] = name

    def _fold_release(self, record: run_records.ReleaseRecord, at: float) -> None:
        match record:
            case run_records.AttemptReleased(job=job):
                self._turn(job, S.SAVED_AND_GONE, at, places=())
                self._note(record, ended=at)
            case run_records.ReleaseBegan(job=job, makes_room_for=other):
                run = self.by_name[job]
                saves = record if run.phase is not P.RELEASED else None  # then only the reason is another one
                self._modify(job, release=saves, releasing=at, makes_room_for=other)
                self._modify(job, displaced=at if other else run.displaced)
            case run_records.ReleaseEnded(job=job):
                self._modify(job, release=None)
            case run_records.RunResumed(job=job, request=request):
                self._turn(job, S.RESUMED, at, wait_until=at, resumed=request, reason="")

    def _turn(self, job: str, sign: RunSign, at: float, **fields: object) -> Run:
        phase = RUN_NEXT[(self.by_name[job].phase, sign)]
        return self._modify(job, phase=phase, since=at, **fields)

    def _modify(self, job: str, **fields: object) -> Run:
        self.by_name[job] = run = replace(self.by_name[job], **fields)
        return run

    def _note(self, record: run_records.AttemptRecord, **fields: object) -> None:
        """Add to the note of the latest attempt what a record says, in fields of the same names."""
        run = self.by_name[record.job]
        note = run.note.with_fields(record, **fields)
        self._modify(record.job, notes=(*run.notes[:-1], note))
