"""The cluster state: all that the weaver knows.

Only `fold` changes the durable part, so that a restarted weaver folds the log and has the same state again.
`cluster.runtime` is what was observed since the weaver started. It is neither stored nor compared.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Literal

import msgspec
from msgspec.structs import replace

from torchloom.core.state.change_ledger import Change, ChangePhase, Ledger, LedgerState
from torchloom.core.state.checkpoint_index import CheckpointIndex, CheckpointIndexState
from torchloom.core.state.device import Device
from torchloom.core.state.device import fold as fold_device
from torchloom.core.state.drmap import DRMap, Seat
from torchloom.core.state.goodput import Account, Accounts
from torchloom.core.state.incident import Incident, cause_of, follow, stopped
from torchloom.core.state.incidents import Incidents
from torchloom.core.state.pending_operations import PendingOperation, Volatile
from torchloom.core.state.presence import JOB_NEXT, PRESENT, RANK_NEXT, JobPhase, JobSign, Presence, Sign
from torchloom.core.state.runs import Run, Runs, RunsState
from torchloom.core.state.runtime import RuntimeState
from torchloom.protocol.ids import RankId
from torchloom.protocol.incident_records import About, IncidentAmended, IncidentOpened
from torchloom.protocol.operator import Mark
from torchloom.protocol.phrase import Phrase, Prose, phrase
from torchloom.protocol.records import (
    ChangeDecided,
    ChangeProposed,
    ChangeSettled,
    CheckpointSaved,
    DeviceBlamed,
    DeviceCleared,
    DeviceMarkedFailed,
    DeviceMarkedRecovered,
    DeviceSeated,
    InboxRead,
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
from torchloom.settings import Settings

FORMAT = 2
"""Of the log and the snapshots; any other is refused rather than misread.

1 stored sentences. 2 stores phrases and typed reasons (docs/decisions/0015-phrases.md).
"""
KEEP_EVICTED = 1000
KEEP_MARKS = 50
"""Of each job."""


class Rank(msgspec.Struct, frozen=True, kw_only=True):
    id: RankId
    incarnation: str
    presence: Presence
    since: float
    reason: Prose = ""
    left: Literal["", "finished", "interrupted"] = ""
    """How, if it has left."""
    patient: bool = False
    node: str = ""
    pid: int = 0
    devices: tuple[str, ...] = ()
    world_size: int = 1
    launcher: str = ""
    counted: bool = False
    """Its script has not attached."""
    incident: str = ""
    """The open incident about this rank."""
    member: str = ""
    """Its replica's id in torchft: of this life alone."""
    process: str = ""


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
    hand_seats: tuple[Seat, ...] = ()
    incidents: tuple[Incident, ...] = ()
    ledger: LedgerState = LedgerState()
    keeping: CheckpointIndexState = CheckpointIndexState()
    runs: RunsState = RunsState()
    goodput: tuple[Account, ...] = ()
    evicted: tuple[tuple[str, tuple[str, ...]], ...] = ()
    marks: tuple[tuple[float, Record], ...] = ()


def life_over(how: Literal["finished", "interrupted"]) -> Phrase:
    """Why a life of a rank is over that has left."""
    return phrase("life_finished" if how == "finished" else "life_interrupted")


class ClusterState:
    def __init__(self, settings: Settings, state: State | None = None) -> None:
        state = state or State()
        self.settings = settings
        self.runtime = RuntimeState(settings)
        self.ledger = Ledger(state.ledger)
        self.keeping = CheckpointIndex(state.keeping)
        self.runs = Runs(state.runs)
        self.goodput = Accounts(state.goodput)
        self.evicted = dict(state.evicted)
        """By job: whom its lighthouse must not count on, the latest."""
        self.marks: dict[str, tuple[tuple[float, Record], ...]] = {}
        """By job: the latest, each with its time."""
        for at, record in state.marks:
            self._mark(record, at)
        self.term = state.term
        self.inbox_seq = state.inbox_seq
        self.jobs = {job.name: job for job in state.jobs}
        self.ranks = {rank.id: rank for rank in state.ranks}
        self.devices = {device.id: device for device in state.devices}
        self.incidents = Incidents(state.incidents, state.incident_count)
        self.hand_seats = set(state.hand_seats)
        self.drmap = DRMap(self.hand_seats)
        self._order: list[RankId] | None = None
        self.ranks_of_job: dict[str, set[RankId]] = {}
        self.present_of_job: Counter[str] = Counter()
        """How many of them are present."""
        for rank in state.ranks:
            self.ranks_of_job.setdefault(rank.id.job, set()).add(rank.id)
            if rank.presence in PRESENT:
                self.present_of_job[rank.id.job] += 1
                self._seat(rank)
        self.runtime.adopt(
            (rank.id, rank.incarnation, rank.presence is Presence.LOST or rank.presence is Presence.DEAD,
             rank.presence is Presence.LEFT or rank.presence is Presence.FAILED)
            for rank in state.ranks
        )  # fmt: skip
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
            hand_seats=tuple(sorted(self.hand_seats, key=lambda seat: (seat.device, seat.replica))),
            incidents=tuple(self.incidents.values()),
            ledger=self.ledger.state(),
            keeping=self.keeping.state(),
            runs=self.runs.state(),
            goodput=self.goodput.state(),
            evicted=tuple((job, self.evicted[job]) for job in sorted(self.evicted)),
            marks=tuple(mark for job in sorted(self.marks) for mark in self.marks[job]),
        )

    def order(self) -> list[RankId]:
        """All ranks, sorted; sorted anew only when there are others."""
        if self._order is None:
            self._order = sorted(self.ranks)
        return self._order

    def lives(self, rank: RankId, incarnation: str) -> bool:
        """Whether this life of the rank is still counted on."""
        known = self.ranks.get(rank)
        return known is not None and known.incarnation == incarnation and known.presence in PRESENT

    def furthest(self, run: Run) -> int:
        """The furthest step that was heard of from the attempt under way, or the one it went on from."""
        steps = [run.resume_step or 0]
        for place in run.places:
            rank_runtime = self.runtime.ranks.get(run.rank(place.rank))
            if (
                rank_runtime is not None
                and rank_runtime.beat is not None
                and rank_runtime.incarnation == place.incarnation
            ):
                steps.append(rank_runtime.beat.step)
        for node in run.nodes:  # an agent sees steps that a rank did not live to tell of
            if (seen := self.runtime.nodes.get(node)) is not None:
                mine = (s for s in seen.beat.attempts if s.job == run.job and s.attempt == run.attempt)
                steps += [rank.step for status in mine for rank in status.ranks]
        return max(steps)

    def ranks_of(self, run: Run) -> list[RankId]:
        """Those that are known of the replica it runs."""
        return sorted(rank for rank in self.ranks_of_job.get(run.of.job, ()) if rank.of == run.of)

    def incidents_of(self, run: Run) -> list[Incident]:
        """The open ones that are about this run; oldest first."""
        mine = self.incidents.open_of(run.of.job)
        return [i for i in mine if self.runs.concerned(i.job, i.about) == run]

    def step_of(self, job: str) -> int | None:
        """Of the rank that is least far; None if none has reported since this weaver started."""
        runtimes = map(self.runtime.ranks.get, self.ranks_of_job.get(job, ()))
        return min((rank.beat.step for rank in runtimes if rank is not None and rank.beat is not None), default=None)

    def restart_runtime(self, now: float) -> None:
        """After a replay, a reconnection or a nap: full patience for everyone."""
        lost = {rank.id: rank.patient for rank in self.ranks.values() if rank.presence is Presence.LOST}
        self.runtime.restart(now, lost)

    def beat_seconds(self) -> float:
        """How often each rank should speak, given how many there are."""
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
                self.ranks[rank] = replace(self.ranks[rank], counted=False)
            case RankLost(rank=rank, reason=reason, patient=patient):
                self._turn(rank, Sign.LINK_CLOSED, reason, at, patient=patient)
                self.runtime.lost(rank, patient, at)
            case RankFound(rank=rank, reason=reason):
                self._turn(rank, Sign.HEARD, reason, at)
                self.runtime.found(rank, at)
            case RankDied(rank=rank, reason=reason, confirmed=confirmed):
                self._turn(rank, Sign.ENDED_BADLY if confirmed else Sign.GRACE_OVER, reason, at)
                self.runtime.gone(rank, final=confirmed)
            case RankLeft(rank=rank, how=how):
                self._turn(rank, Sign.GOODBYE, life_over(how), at)
                self.ranks[rank] = replace(self.ranks[rank], left=how)
                self.runtime.gone(rank, final=True)
            case RankForgotten(rank=rank):
                self._forget(rank)
            case JobBegan(job=name):
                self._begin(name, at)
            case JobEnded(job=name, outcome=outcome, reason=reason):
                self.jobs[name] = replace(self.jobs[name], phase=JobPhase(outcome), ended=at, reason=reason)
            case JobForgotten(job=name):
                self._forget_job(name)
            case DeviceSeated(device=device, replica=replica, node=node):
                seat = Seat(device, replica, None, node)
                self.hand_seats.add(seat)
                self.drmap.add(seat)
                self._know_device(device, node, at)
            case DeviceBlamed() | DeviceCleared() | DeviceMarkedFailed() | DeviceMarkedRecovered():
                if isinstance(record, DeviceBlamed):
                    self._know_device(record.device, record.node, at)
                self.devices[record.device] = fold_device(self.devices[record.device], record, at)
            case IncidentOpened():
                self._open(record, at)
            case IncidentAmended():
                self._amend(record, at)
            case _:
                self._fold_steering(record, at)

    def _begin(self, name: str, at: float) -> None:
        for rank in list(self.ranks_of_job.get(name, ())):  # what remains of an earlier run
            if self.ranks[rank].presence not in PRESENT:
                self._forget(rank)
        self.ledger.forget(name)
        self.marks.pop(name, None)
        began = self.jobs.get(name)
        phase = JOB_NEXT[(began.phase, JobSign.JOINED)] if began else JobPhase.RUNNING
        self.jobs[name] = Job(name=name, phase=phase, began=at)

    def _mark(self, record: Record, at: float) -> None:
        for job in named_jobs(record):
            self.marks[job] = (*self.marks.get(job, ()), (at, record))[-KEEP_MARKS:]

    def _fold_steering(self, record: Record, at: float) -> None:
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
                if rank in self.ranks and self.ranks[rank].incarnation == record.incarnation:
                    self.ranks[rank] = replace(self.ranks[rank], member=member)
            case Mark():
                self._mark(record, at)
            case MembersEvicted(job=job, members=members):
                self.evicted[job] = (*self.evicted.get(job, ()), *members)[-KEEP_EVICTED:]
            case _:
                if isinstance(record, CheckpointSaved):
                    self.runtime.saves(record.rank.job).saved(at)
                self.keeping.fold(record, at)
                follow(self.incidents, self.runs, record, at)
                self.runs.fold(record, at)
                self.goodput.fold(record, at, self._run_of(record.rank) if isinstance(record, JobResumed) else "")
                if isinstance(record, AttemptStopping) and record.incident in self.incidents:
                    self._stopped_for(record.incident, self.runs.by_job[record.job], at)

    def _follow_change(self, change: Change, at: float) -> None:
        """Keep the course of a change in step with the ledger, and tell the watch what beats must say from now on."""
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
            for rank in self.ranks_of_job.get(change.job, ()):  # also of those that joined while it was agreed on
                if change.is_for(rank):
                    self.runtime.expect(rank, self.ranks[rank].incarnation, change.change)
        if change.phase is ChangePhase.COMMITTED:
            operation = operations.by_request.get(change.request)
            if operation is None:
                operation = PendingOperation(change.request, change.job, dict(change.lives), id=change.id)
                operations.begin(operation)
            operation.committed, operation.began, operation.sent = True, at, at

    def _join(self, record: RankJoined, at: float) -> None:
        self.goodput.fold(record, at, self._run_of(record.rank))
        hello, rank_id = record.hello, record.rank
        rank = Rank(
            id=rank_id,
            incarnation=hello.incarnation,
            presence=Presence.LIVE,
            since=at,
            node=hello.node,
            pid=hello.pid,
            devices=hello.devices,
            world_size=hello.world_size,
            launcher=hello.launcher,
            counted=hello.counted,
            process=hello.process,
        )
        self._count(rank_id, Presence.LIVE)
        self.ranks[rank_id] = rank
        self._order = None
        self.ranks_of_job.setdefault(rank_id.job, set()).add(rank_id)
        for device in hello.devices:
            self._know_device(device, hello.node, at)
        self.drmap.remove_rank(rank_id)
        self._seat(rank)
        self.runtime.joined(rank_id, hello.incarnation, at)
        for change in self.ledger.in_force(rank_id):
            self.runtime.expect(rank_id, hello.incarnation, change)

    def _turn(self, rank_id: RankId, sign: Sign, reason: Prose, at: float, patient: bool = False) -> None:
        rank = self.ranks[rank_id]
        presence = RANK_NEXT[(rank.presence, sign)]
        self._count(rank_id, presence)
        rank = replace(rank, presence=presence, since=at, reason=reason, patient=patient)
        self.ranks[rank_id] = rank
        if presence in PRESENT:
            self._seat(rank)
        else:
            self.drmap.remove_rank(rank_id)

    def _count(self, rank: RankId, presence: Presence | None) -> None:
        """A rank is about to have this presence; None: to be forgotten."""
        known = self.ranks.get(rank)
        was = known is not None and known.presence in PRESENT
        self.present_of_job[rank.job] += (presence in PRESENT) - was

    def _seat(self, rank: Rank) -> None:
        for device in rank.devices:
            self.drmap.add(Seat(device, rank.id.of, rank.id.rank, rank.node))

    def _know_device(self, device: str, node: str, at: float) -> None:
        if device not in self.devices:
            self.devices[device] = Device(id=device, node=node, since=at)
        elif node and self.devices[device].node != node:
            self.devices[device] = replace(self.devices[device], node=node)

    def _forget_job(self, name: str) -> None:
        for rank in list(self.ranks_of_job.get(name, ())):
            self._forget(rank)
        self.jobs.pop(name, None)
        self.runtime.forget_job(name)
        self.ledger.forget(name)
        self.keeping.forget(name)
        self.evicted.pop(name, None)
        self.marks.pop(name, None)
        for run in self.runs.forget(name):
            self.goodput.forget(run)

    def _forget(self, rank: RankId) -> None:
        self._count(rank, None)
        self.ranks.pop(rank, None)
        self._order = None
        self.ranks_of_job.get(rank.job, set()).discard(rank)
        if not self.ranks_of_job.get(rank.job):
            self.ranks_of_job.pop(rank.job, None)
            del self.present_of_job[rank.job]
        self.drmap.remove_rank(rank)
        self.runtime.forgotten(rank)

    def _open(self, record: IncidentOpened, at: float) -> None:
        self.incidents.open(record, at)
        self._refer(record.about, record.id)
        run = self.runs.concerned(record.job, record.about)
        self.goodput.fold(record, at, run.job if run is not None else "")

    def _amend(self, record: IncidentAmended, at: float) -> None:
        incident = self.incidents.get(record.id)
        if incident is None:
            return  # closed so long ago that it was dropped
        self.incidents.amend(record, at, self.settings.keep_closed_incidents)
        self.goodput.fold(record, at)
        if record.closed:
            self._refer(incident.about, "")

    def _run_of(self, rank: RankId) -> str:
        run = self.runs.of(rank.of)
        return run.job if run is not None else ""

    def _stopped_for(self, id: str, run: Run, at: float) -> None:
        incident = self.incidents[id] = stopped(self.incidents[id], run, at)
        self.goodput.blame(run.job, cause_of(incident), incident.opened, at)

    def _refer(self, about: About, incident: str) -> None:
        """Let the rank or device that an incident is about as a whole point to it while it is open."""
        if about.part:
            return
        if about.device in self.devices:
            self.devices[about.device] = replace(self.devices[about.device], incident=incident)
        elif about.rank in self.ranks:
            self.ranks[about.rank] = replace(self.ranks[about.rank], incident=incident)
