"""The cluster state: everything that the weaver has recorded or observed.

Only `fold` changes the durable part, so that a restarted weaver folds the log and has the same state again.
`cluster.runtime` is what was observed since the weaver started. It is neither stored nor compared.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import msgspec
from msgspec.structs import replace

from torchloom.core.state.change_ledger import Change, ChangePhase, Ledger, LedgerState
from torchloom.core.state.checkpoint_index import CheckpointIndex
from torchloom.core.state.device_map import Device, DRMap, fold_device
from torchloom.core.state.goodput import Account, Accounts
from torchloom.core.state.incidents import Incident, Incidents, cause_of
from torchloom.core.state.pending_operations import PendingOperation, Volatile
from torchloom.core.state.ranks import JOB_NEXT, PRESENT, JobPhase, JobSign, Presence, Rank, Ranks, Sign
from torchloom.core.state.runs import Run, Runs, RunsState
from torchloom.core.state.runtime import RuntimeState
from torchloom.protocol.ids import RankId
from torchloom.protocol.operator import Mark
from torchloom.protocol.phrase import Phrase, Prose, phrase
from torchloom.protocol.rank import Beat
from torchloom.protocol.records import (
    About,
    ChangeDecided,
    ChangeProposed,
    ChangeSettled,
    CheckpointSaved,
    DeviceBlamed,
    DeviceCleared,
    DeviceMarkedFailed,
    DeviceMarkedRecovered,
    DeviceRegistered,
    InboxRead,
    IncidentAmended,
    IncidentOpened,
    JobBegan,
    JobEnded,
    JobForgotten,
    JobResumed,
    KnobsOffered,
    MemberJoined,
    MembersEvicted,
    OrderEnded,
    OrderGiven,
    RankAttached,
    RankDied,
    RankForgotten,
    RankFound,
    RankJoined,
    RankLeft,
    RankLost,
    Record,
    TermBegan,
    named_jobs,
)
from torchloom.protocol.run_records import AttemptStopping
from torchloom.protocol.views import Assignment, CheckpointsView
from torchloom.settings import Settings

FORMAT = 4
"""Of the log and the snapshots; any other is refused rather than misread. 1 stored sentences; 2, 3 had other names."""
KEEP_EVICTED = 1000
KEEP_MARKS = 50
"""Of each job."""


class Job(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    phase: JobPhase
    began: float
    ended: float | None = None
    reason: Prose = ""


class State(msgspec.Struct, frozen=True, kw_only=True):
    """The durable part of a cluster state as one value: what a snapshot stores."""

    format: int = FORMAT
    term: int = 0
    inbox_seq: int = 0
    incident_count: int = 0
    jobs: tuple[Job, ...] = ()
    ranks: tuple[Rank, ...] = ()
    devices: tuple[Device, ...] = ()
    registered: tuple[Assignment, ...] = ()
    incidents: tuple[Incident, ...] = ()
    ledger: LedgerState = LedgerState()
    checkpoints: tuple[CheckpointsView, ...] = ()
    runs: RunsState = RunsState()
    goodput: tuple[Account, ...] = ()
    evicted: tuple[tuple[str, tuple[str, ...]], ...] = ()
    marks: tuple[tuple[float, Record], ...] = ()


def life_over(how: Literal["finished", "interrupted"]) -> Phrase:
    """The reason of a rank that has left."""
    return phrase("life_finished" if how == "finished" else "life_interrupted")


class ClusterState:
    def __init__(self, settings: Settings, state: State | None = None) -> None:
        state = state or State()
        self.settings = settings
        self.runtime = RuntimeState(settings)
        self.ledger = Ledger(state.ledger)
        self.checkpoints = CheckpointIndex(state.checkpoints)
        self.runs = Runs(state.runs)
        self.goodput = Accounts(state.goodput)
        self.evicted = dict(state.evicted)
        """By job: the latest members that its lighthouse must not count on."""
        self.marks: dict[str, tuple[tuple[float, Record], ...]] = {}
        """By job: the latest, each with its time."""
        for at, record in state.marks:
            self._mark(record, at)
        self.term = state.term
        self.inbox_seq = state.inbox_seq
        self.jobs = {job.name: job for job in state.jobs}
        self.devices = {device.id: device for device in state.devices}
        self.incidents = Incidents(state.incidents, state.incident_count)
        self.registered = set(state.registered)
        self.drmap = DRMap(self.registered)
        self.ranks = Ranks(state.ranks, self.drmap)
        self.runtime.adopt(state.ranks)
        for change in self.ledger.changes.values():
            self._follow_change(change, 0.0)
        for order in self.ledger.orders.values():
            if not order.outcome:
                self.runtime.operations.begin(
                    PendingOperation(order.request, order.job, dict(order.lives), id=order.id)
                )

    def state(self) -> State:
        """The durable part, in a fixed order: equal states compare equal."""
        return State(
            term=self.term,
            inbox_seq=self.inbox_seq,
            incident_count=self.incidents.count,
            jobs=tuple(self.jobs[name] for name in sorted(self.jobs)),
            ranks=tuple(self.ranks[rank] for rank in sorted(self.ranks)),
            devices=tuple(self.devices[device] for device in sorted(self.devices)),
            registered=tuple(sorted(self.registered, key=lambda assignment: (assignment.device, assignment.replica))),
            incidents=tuple(self.incidents.values()),
            ledger=self.ledger.state(),
            checkpoints=self.checkpoints.state(),
            runs=self.runs.state(),
            goodput=self.goodput.state(),
            evicted=tuple((job, self.evicted[job]) for job in sorted(self.evicted)),
            marks=tuple(mark for job in sorted(self.marks) for mark in self.marks[job]),
        )

    def lives(self, rank: RankId, incarnation: str) -> bool:
        """Whether this incarnation of the rank still counts as present."""
        latest = self.ranks.find(rank, incarnation)
        return latest is not None and latest.presence in PRESENT

    def furthest(self, run: Run) -> int:
        """The furthest step reported of the attempt under way, or the step it resumed from."""
        steps = [run.resume_step or 0]
        for place in run.places:
            beat = self.runtime.last_beat(run.rank(place.rank), place.incarnation)
            if beat is not None:
                steps.append(beat.step)
        for node in run.nodes:  # an agent sees steps that a rank did not live to report
            if (status := self.runtime.attempt_status(node, run)) is not None:
                steps += [rank.step for rank in status.ranks]
        return max(steps)

    def ranks_of(self, run: Run) -> list[RankId]:
        """The ranks that have joined of the replica that it starts."""
        return [rank.id for rank in self.ranks.of_replica(run.replica_id)]

    def incidents_of(self, run: Run) -> list[Incident]:
        """The open incidents about this run; oldest first."""
        of_job = self.incidents.open_of(run.replica_id.job)
        return [incident for incident in of_job if self.runs.concerned(incident.job, incident.about) == run]

    def reporting_beats(self, job: str) -> list[Beat]:
        """The last beats of the ranks that train; of all ranks, if none trains any more."""
        ranks = self.ranks.of_job(job)
        live = [rank for rank in ranks if rank.presence is Presence.LIVE and not self.is_evicted(rank)]
        runs = self.jobs[job].phase is JobPhase.RUNNING
        runtimes = (self.runtime.ranks.get(rank.id) for rank in (live if runs and live else ranks))
        return [runtime.beat for runtime in runtimes if runtime is not None and runtime.beat is not None]

    def is_evicted(self, rank: Rank) -> bool:
        """Whether the lighthouse of its job must not count on it."""
        return bool(rank.member) and rank.member in self.evicted.get(rank.id.job, ())

    def step_of(self, job: str) -> int | None:
        """Of the rank that is least far; None if none has reported since this weaver started."""
        return min((beat.step for beat in self.reporting_beats(job)), default=None)

    def restart_runtime(self, now: float) -> None:
        """After a replay, a reconnection or a suspension: every timer starts again."""
        lost = {rank.id: rank.patient for rank in self.ranks.values() if rank.presence is Presence.LOST}
        self.runtime.restart(now, lost)

    def beat_seconds(self) -> float:
        """Seconds between two beats of a rank: more ranks send less often."""
        return max(self.settings.beat_seconds, len(self.ranks) / self.settings.ranks_per_beat_second)

    # ── fold ──

    def fold(self, records: Iterable[Record | Volatile], at: float) -> None:
        for record in records:
            if isinstance(record, Volatile):
                self.runtime.operations.fold(record, at)
            else:
                self._fold(record, at)

    def _fold(self, record: Record, at: float) -> None:
        match record:
            case InboxRead(seq=seq):
                self.inbox_seq = max(self.inbox_seq, seq)
            case TermBegan(term=term):
                self.term = term
            case RankJoined():
                self._join(record, at)
            case RankAttached(rank=rank):
                self.ranks.modify(rank, counted=False)
            case RankLost(rank=rank, reason=reason, patient=patient):
                self.ranks.advance(rank, Sign.LINK_CLOSED, reason, at, patient=patient)
                self.runtime.lost(rank, patient, at)
            case RankFound(rank=rank, reason=reason):
                self.ranks.advance(rank, Sign.HEARD, reason, at)
                self.runtime.came_back(rank, at)
            case RankDied(rank=rank, reason=reason, confirmed=confirmed):
                self.ranks.advance(rank, Sign.ENDED_BADLY if confirmed else Sign.GRACE_OVER, reason, at)
                self.runtime.gone(rank, final=confirmed)
            case RankLeft(rank=rank, how=how):
                self.ranks.advance(rank, Sign.GOODBYE, life_over(how), at)
                self.ranks.modify(rank, left=how)
                self.runtime.gone(rank, final=True)
            case RankForgotten(rank=rank):
                self._forget(rank)
            case JobBegan(job=name):
                self._begin(name, at)
            case JobEnded(job=name, outcome=outcome, reason=reason):
                self.jobs[name] = replace(self.jobs[name], phase=JobPhase(outcome), ended=at, reason=reason)
            case JobForgotten(job=name):
                self._forget_job(name)
            case DeviceRegistered(device=device, replica=replica, node=node):
                assignment = Assignment(device=device, replica=replica, node=node)
                self.registered.add(assignment)
                self.drmap.add(assignment)
                self._add_device(device, node, at)
            case DeviceBlamed() | DeviceCleared() | DeviceMarkedFailed() | DeviceMarkedRecovered():
                if isinstance(record, DeviceBlamed):
                    self._add_device(record.device, record.node, at)
                self.devices[record.device] = fold_device(self.devices[record.device], record, at)
            case IncidentOpened():
                self._open(record, at)
            case IncidentAmended():
                self._amend(record, at)
            case _:
                self._fold_change(record, at)

    def _begin(self, name: str, at: float) -> None:
        for earlier_rank in self.ranks.of_job(name):
            if earlier_rank.presence not in PRESENT:
                self._forget(earlier_rank.id)
        self.ledger.forget(name)
        self.marks.pop(name, None)
        job = self.jobs.get(name)
        phase = JOB_NEXT[(job.phase, JobSign.JOINED)] if job else JobPhase.RUNNING
        self.jobs[name] = Job(name=name, phase=phase, began=at)

    def _mark(self, record: Record, at: float) -> None:
        for job in named_jobs(record):
            self.marks[job] = (*self.marks.get(job, ()), (at, record))[-KEEP_MARKS:]

    def _fold_change(self, record: Record, at: float) -> None:
        match record:
            case KnobsOffered():
                self.ledger.offer(record)
            case ChangeProposed():
                self.ledger.propose(record, at)
                self._follow_change(self.ledger.changes[record.change.id], at)
            case ChangeDecided(id=id):
                self.ledger.decide(record)
                self._follow_change(self.ledger.changes[id], at)
            case ChangeSettled(id=id):
                request = self.ledger.changes[id].request
                self.ledger.settle(record)
                self.runtime.operations.end(request)
            case OrderGiven(id=id, request=request, job=job, lives=lives):
                self.ledger.give(record, at)
                self.runtime.operations.begin(PendingOperation(request, job, dict(lives), id=id, began=at, sent=at))
            case OrderEnded(id=id):
                request = self.ledger.orders[id].request
                self.ledger.end(record)
                self.runtime.operations.end(request)
            case MemberJoined(rank=rank, member=member):
                if self.ranks.find(rank, record.incarnation) is not None:
                    self.ranks.modify(rank, member=member)
            case Mark():
                self._mark(record, at)
            case MembersEvicted(job=job, members=members):
                self.evicted[job] = (*self.evicted.get(job, ()), *members)[-KEEP_EVICTED:]
            case _:
                if isinstance(record, CheckpointSaved):
                    self.runtime.checkpoint_detector(record.rank.job).saved(at)
                self.checkpoints.fold(record, at)
                self.incidents.follow_run(record, self.runs, at)
                self.runs.fold(record, at)
                self.goodput.fold(record, at, self._run_of(record.rank) if isinstance(record, JobResumed) else "")
                if isinstance(record, AttemptStopping) and record.incident in self.incidents:
                    self._stopped_for(record.incident, self.runs.by_name[record.job], at)

    def _follow_change(self, change: Change, at: float) -> None:
        """Update the pending operation of a change, and which changes the beats of its ranks must report."""
        operations = self.runtime.operations
        if change.phase is ChangePhase.PROPOSED:
            operation = operations.by_request.get(change.request)
            if operation is None or operation.id:
                operation = PendingOperation(change.request, change.job, dict(change.lives))
                operations.begin(operation)
            operation.id, operation.began, operation.sent = change.id, at, at
        elif change.phase is ChangePhase.ABORTED:
            operations.end(change.request)
        if change.takes_effect and change.change.action == "set":
            for rank in self.ranks.ids_of(change.job):  # also of those that joined while it was agreed on
                if change.is_for(rank):
                    self.runtime.expect(rank, self.ranks[rank].incarnation, change.change)
        if change.phase is ChangePhase.COMMITTED:
            operation = operations.by_request.get(change.request)
            if operation is None:
                operation = PendingOperation(change.request, change.job, dict(change.lives), id=change.id)
                operations.begin(operation)
            operation.committed, operation.began, operation.sent = True, at, at

    def _join(self, record: RankJoined, at: float) -> None:
        rank, hello = record.rank, record.hello
        self.goodput.fold(record, at, self._run_of(rank))
        for device in hello.devices:
            self._add_device(device, hello.node, at)
        self.ranks.join(record, at)
        self.runtime.joined(rank, hello.incarnation, at)
        for change in self.ledger.in_force(rank):
            self.runtime.expect(rank, hello.incarnation, change)

    def _add_device(self, device: str, node: str, at: float) -> None:
        if device not in self.devices:
            self.devices[device] = Device(id=device, node=node, since=at)
        elif node and self.devices[device].node != node:
            self.devices[device] = replace(self.devices[device], node=node)

    def _forget_job(self, name: str) -> None:
        for rank in self.ranks.of_job(name):
            self._forget(rank.id)
        self.jobs.pop(name, None)
        self.runtime.forget_job(name)
        self.ledger.forget(name)
        self.checkpoints.pop(name, None)
        self.evicted.pop(name, None)
        self.marks.pop(name, None)
        for run in self.runs.forget(name):
            self.goodput.forget(run)

    def _forget(self, rank: RankId) -> None:
        del self.ranks[rank]
        self.runtime.forgotten(rank)

    def _open(self, record: IncidentOpened, at: float) -> None:
        self.incidents.open(record, at)
        self._refer(record.about, record.id)
        run = self.runs.concerned(record.job, record.about)
        self.goodput.fold(record, at, run.name if run is not None else "")

    def _amend(self, record: IncidentAmended, at: float) -> None:
        incident = self.incidents.get(record.id)
        if incident is None:
            return  # it was closed, and is not kept any more
        self.incidents.amend(record, at, self.settings.keep_closed_incidents)
        self.goodput.fold(record, at)
        if record.closed:
            self._refer(incident.about, "")

    def _run_of(self, rank: RankId) -> str:
        run = self.runs.of(rank.replica_id)
        return run.name if run is not None else ""

    def _stopped_for(self, id: str, run: Run, at: float) -> None:
        incident = self.incidents.record_stop(id, run, at)
        self.goodput.blame(run.name, cause_of(incident), incident.opened, at)

    def _refer(self, about: About, incident: str) -> None:
        """Let the rank or device that an incident is about as a whole point to it while it is open."""
        if about.part:
            return
        if about.device in self.devices:
            self.devices[about.device] = replace(self.devices[about.device], incident=incident)
        elif about.rank is not None and about.rank in self.ranks:
            self.ranks.modify(about.rank, incident=incident)
