"""The cluster state: everything that the weaver has recorded or observed.

Only `fold` changes the durable part, so that a restarted weaver folds the log and has the same state again.
`cluster.runtime` is what was observed since the weaver started. It is neither stored nor compared.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import msgspec
from msgspec.structs import replace

from torchloom.core.state.change_ledger import Change, ChangePhase, Ledger
from torchloom.core.state.checkpoint_index import CheckpointIndex
from torchloom.core.state.device_map import Device, Devices, DRMap
from torchloom.core.state.goodput import Account, Accounts
from torchloom.core.state.incident_history import Incident, Incidents, cause_of
from torchloom.core.state.pending_operations import Volatile
from torchloom.core.state.rank_states import JOB_NEXT, PRESENT, JobPhase, JobSign, Presence, Rank, Ranks, Sign
from torchloom.core.state.run_states import Run, Runs
from torchloom.core.state.runtime import RuntimeState
from torchloom.protocol import records
from torchloom.protocol.ids import RankId
from torchloom.protocol.operator import Mark, NodeDrained, ReplicaDrained, ScheduleSet
from torchloom.protocol.phrase import Phrase, Prose, phrase
from torchloom.protocol.rank import Beat, CheckpointFailed, CheckpointSaved, JobResumed, MemberJoined
from torchloom.protocol.records import Record
from torchloom.protocol.run_records import AttemptStopping, RunRecord
from torchloom.protocol.scheduling import ScheduleRules
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
    step: int | None = None
    loss: float | None = None
    """The last ones, once it has ended."""


class State(msgspec.Struct, frozen=True, kw_only=True):
    """The durable part of a cluster state as one value: what a snapshot stores."""

    format: int = FORMAT
    term: int = 0
    inbox_seq: int = 0
    incident_count: int = 0
    jobs: dict[str, Job] = {}
    ranks: tuple[Rank, ...] = ()
    devices: dict[str, Device] = {}
    registered: tuple[Assignment, ...] = ()
    incidents: tuple[Incident, ...] = ()
    ledger: Ledger = msgspec.field(default_factory=Ledger)
    checkpoints: dict[str, CheckpointsView] = {}
    runs: dict[str, Run] = {}
    drained_nodes: frozenset[str] = frozenset()
    goodput: dict[str, Account] = {}
    evicted: dict[str, tuple[str, ...]] = {}
    marks: dict[str, tuple[tuple[float, Record], ...]] = {}
    schedule: ScheduleRules = ScheduleRules()


def life_over(how: Literal["finished", "interrupted"]) -> Phrase:
    """The reason of a rank that has left."""
    return phrase("life_finished" if how == "finished" else "life_interrupted")


class ClusterState:
    def __init__(self, settings: Settings, state: State | None = None) -> None:
        state = state or State()
        self.settings = settings
        self.runtime = RuntimeState(settings)
        self.ledger = state.ledger.copy()
        self.checkpoints = CheckpointIndex(state.checkpoints)
        self.runs = Runs(state.runs.values(), state.drained_nodes)
        self.goodput = Accounts(state.goodput)
        self.evicted = dict(state.evicted)
        """By job: the latest members that its lighthouse must not count on."""
        self.marks = dict(state.marks)
        """By job: the latest, each with its time."""
        self.schedule = state.schedule
        self.term = state.term
        self.inbox_seq = state.inbox_seq
        self.jobs = dict(state.jobs)
        self.devices = Devices(state.devices)
        self.incidents = Incidents(state.incidents, state.incident_count)
        self.drmap = DRMap(state.registered)
        self.ranks = Ranks(state.ranks, self.drmap)
        for rank in state.ranks:
            self.runtime.joined(rank, 0.0)
        for change in self.ledger.changes.values():
            self.runtime.operations.follow(change, 0.0)
            self._expect(change)
        for order in self.ledger.orders.values():
            self.runtime.operations.follow(order, 0.0)

    def state(self) -> State:
        """The durable part. Equal states compare equal."""
        return State(
            term=self.term,
            inbox_seq=self.inbox_seq,
            incident_count=self.incidents.count,
            jobs=dict(self.jobs),
            ranks=tuple(self.ranks[rank] for rank in sorted(self.ranks)),
            devices=dict(self.devices),
            registered=tuple(self.drmap.registered()),
            incidents=tuple(self.incidents.values()),
            ledger=self.ledger.copy(),
            checkpoints=dict(self.checkpoints),
            runs=dict(self.runs.by_name),
            drained_nodes=frozenset(self.runs.drained),
            goodput=dict(self.goodput),
            evicted=dict(self.evicted),
            marks=dict(self.marks),
            schedule=self.schedule,
        )

    def lives(self, rank: RankId, incarnation: str) -> bool:
        """Whether this incarnation of the rank still counts as present."""
        latest = self.ranks.find(rank, incarnation)
        return latest is not None and latest.presence in PRESENT

    def furthest(self, run: Run) -> int:
        """The furthest step reported of the attempt under way, or the step it resumed from."""
        steps = [run.resume_step or 0, *(beat.step for beat in self.last_beats(run) if beat is not None)]
        for node in run.nodes:  # an agent sees steps that a rank did not live to report
            if (status := self.runtime.attempt_status(node, run)) is not None:
                steps += [rank.step for rank in status.ranks]
        return max(steps)

    def last_beats(self, run: Run) -> list[Beat | None]:
        """Of each rank of the attempt under way; None if it was not heard since the weaver started."""
        return [self.runtime.last_beat(run.rank(place.rank), place.incarnation) for place in run.places]

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
        beats = (self.runtime.ranks[rank.id].beat for rank in (live if runs and live else ranks))
        return [beat for beat in beats if beat is not None]

    def is_evicted(self, rank: Rank) -> bool:
        """Whether the lighthouse of its job must not count on it."""
        return bool(rank.member) and rank.member in self.evicted.get(rank.id.job, ())

    def step_of(self, job: str) -> int | None:
        """Of the rank that is least far; None if none has reported since this weaver started, and it has not ended."""
        return min((beat.step for beat in self.reporting_beats(job)), default=self.jobs[job].step)

    def loss_of(self, job: str) -> float | None:
        """The mean of its ranks, otherwise as the step."""
        losses = [beat.loss for beat in self.reporting_beats(job) if beat.loss is not None]
        return sum(losses) / len(losses) if losses else self.jobs[job].loss

    def restart_runtime(self, now: float) -> None:
        """After a replay, a reconnection or a suspension: every timer starts again."""
        self.runtime.restart(now, [rank for rank in self.ranks.values() if rank.presence is Presence.LOST])

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
        self.goodput.fold(record, at, self._run_of(record))
        if isinstance(record, records.RankRecord):
            self._fold_rank(record, at)
        elif isinstance(record, records.ChangeRecord):
            self._fold_change(record, at)
        elif isinstance(record, records.DeviceRecord):
            self.devices.fold(record, at)
            if isinstance(record, records.DeviceRegistered):
                self.drmap.add(Assignment.from_fields(record))
        elif isinstance(record, RunRecord):
            self.incidents.follow_run(record, self.runs, at)
            self.runs.fold(record, at)
            if isinstance(record, Mark):
                self._mark(record.job, record, at)
            if isinstance(record, AttemptStopping) and record.incident in self.incidents:
                incident = self.incidents.record_stop(record.incident, self.runs.by_name[record.job], at)
                self.goodput.blame(record.job, cause_of(incident), incident.opened, at)
        else:
            self._fold_other(record, at)

    def _fold_rank(self, record: records.RankRecord, at: float) -> None:
        match record:
            case records.RankJoined():
                self._join(record, at)
            case records.RankAttached(rank=rank):
                self.ranks.modify(rank, counted=False)
            case records.RankLost(rank=rank, reason=reason, patient=patient):
                self._advance(rank, Sign.LINK_CLOSED, reason, at, patient=patient)
            case records.RankFound(rank=rank, reason=reason):
                self._advance(rank, Sign.HEARD, reason, at)
                self._revive(rank.job)
            case records.RankDied(rank=rank, reason=reason, confirmed=confirmed):
                self._advance(rank, Sign.ENDED_BADLY if confirmed else Sign.GRACE_OVER, reason, at)
            case records.RankLeft(rank=rank, how=how):
                self._advance(rank, Sign.GOODBYE, life_over(how), at, left=how)
            case records.RankForgotten(rank=rank):
                self._forget(rank)

    def _advance(self, rank: RankId, sign: Sign, reason: Prose, at: float, **fields: object) -> None:
        self.ranks.advance(rank, sign, since=at, reason=reason, **fields)
        self.runtime.follow(self.ranks[rank], at)

    def _fold_change(self, record: records.ChangeRecord, at: float) -> None:
        item = self.ledger.fold(record, at)
        if item is not None:
            self.runtime.operations.follow(item, at)
        if isinstance(item, Change) and item.phase is ChangePhase.COMMITTED:
            self._expect(item)

    def _fold_other(self, record: Record, at: float) -> None:
        match record:
            case records.InboxRead(seq=seq):
                self.inbox_seq = max(self.inbox_seq, seq)
            case records.TermBegan(term=term):
                self.term = term
            case records.JobBegan(job=job):
                self._begin(job, at)
            case records.JobEnded(job=job, outcome=outcome):
                fields = {"phase": JobPhase(outcome), "ended": at, "reason": record.reason}
                self.jobs[job] = replace(self.jobs[job], **fields, step=record.step, loss=record.loss)
            case records.JobForgotten(job=job):
                self._forget_job(job)
            case records.IncidentOpened(id=id, about=about):
                self.incidents.open(record, at)
                self._refer(about, id)
            case records.IncidentAmended(id=id) if id in self.incidents:  # others are closed, and are not kept any more
                if record.closed:
                    self._refer(self.incidents[id].about, "")
                self.incidents.amend(record, at, self.settings.keep_closed_incidents)
            case CheckpointSaved() | CheckpointFailed() | JobResumed():
                self.checkpoints.fold(record, at)
                if isinstance(record, CheckpointSaved):
                    self.runtime.checkpoint_detector(record.rank.job).saved(at)
                if isinstance(record, JobResumed):
                    self.incidents.follow_resume(record, self.runs)
            case MemberJoined(rank=rank, incarnation=incarnation, member=member):
                if self.ranks.find(rank, incarnation) is not None:
                    self.ranks.modify(rank, member=member)
            case records.MembersEvicted(job=job, members=members):
                self.evicted[job] = (*self.evicted.get(job, ()), *members)[-KEEP_EVICTED:]
            case Mark(job=job):
                self._mark(job, record, at)
            case ReplicaDrained() | NodeDrained():
                self.runs.fold(record, at)
            case ScheduleSet():
                self.schedule = ScheduleRules.from_fields(record)

    def _mark(self, job: str, record: Record, at: float) -> None:
        self.marks[job] = (*self.marks.get(job, ()), (at, record))[-KEEP_MARKS:]

    def _begin(self, name: str, at: float) -> None:
        for earlier_rank in self.ranks.of_job(name):
            if earlier_rank.presence not in PRESENT:
                self._forget(earlier_rank.id)
        self.ledger.forget(name)
        self.marks.pop(name, None)
        job = self.jobs.get(name)
        phase = JOB_NEXT[(job.phase, JobSign.JOINED)] if job else JobPhase.RUNNING
        self.jobs[name] = Job(name=name, phase=phase, began=at)

    def _revive(self, name: str) -> None:
        """A job whose end was presumed runs on."""
        job = self.jobs[name]
        if job.ended is not None:
            self.jobs[name] = Job(name=name, phase=JOB_NEXT[(job.phase, JobSign.JOINED)], began=job.began)

    def _expect(self, change: Change) -> None:
        """From now on the beats of its ranks must report a change of values, also of those that joined meanwhile."""
        if change.takes_effect and change.change.action == "set":
            for rank in self.ranks.ids_of(change.job):
                if change.is_for(rank):
                    self.runtime.expect(rank, change.change)

    def _join(self, record: records.RankJoined, at: float) -> None:
        rank, hello = record.rank, record.hello
        for device in hello.devices:
            self.devices.add(device, hello.node, at)
        self.ranks[rank] = Rank.from_fields(hello, id=rank, presence=Presence.LIVE, since=at)
        self.runtime.joined(self.ranks[rank], at)
        for change in self.ledger.in_force(rank):
            self.runtime.expect(rank, change)

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
            self.goodput.pop(run, None)

    def _forget(self, rank: RankId) -> None:
        del self.ranks[rank]
        self.runtime.forgotten(rank)

    def _run_of(self, record: Record) -> str:
        """The name of the run that a record concerns."""
        match record:
            case records.RankJoined(rank=rank) | JobResumed(rank=rank):
                run = self.runs.of(rank.replica_id)
            case records.IncidentOpened(job=job, about=about):
                run = self.runs.concerned(job, about)
            case _:
                return getattr(record, "job", "")
        return run.name if run is not None else ""

    def _refer(self, about: records.About, incident: str) -> None:
        """Let the rank or device that an incident is about as a whole point to it while it is open."""
        if about.part:
            return
        if about.device in self.devices:
            self.devices[about.device] = replace(self.devices[about.device], incident=incident)
        elif about.rank is not None and about.rank in self.ranks:
            self.ranks.modify(about.rank, incident=incident)
