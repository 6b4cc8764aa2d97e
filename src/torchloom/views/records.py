"""The log as people read it: one line per record, with the local time it was decided.

A registration reads as the projects torchLoom grew from print it: `Registered device: GPU-… for replica_id: …`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from torchloom.core.state.change_ledger import abort_phrase
from torchloom.protocol.incident_records import IncidentAmended, IncidentOpened, ResponseBegan
from torchloom.protocol.phrase import Prose, phrase
from torchloom.protocol.records import (
    ChangeDecided,
    ChangeProposed,
    ChangeSettled,
    CheckpointFailed,
    CheckpointSaved,
    DeviceBlamed,
    DeviceCleared,
    DeviceMarkedFailed,
    DeviceMarkedRecovered,
    DeviceRegistered,
    Entry,
    InboxRead,
    JobBegan,
    JobEnded,
    JobForgotten,
    JobResumed,
    KnobsOffered,
    MemberDiscarded,
    MemberHealed,
    MemberJoined,
    MemberRegrouped,
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
)
from torchloom.protocol.run_records import AttemptStopping, RunSubmitted
from torchloom.views.answers import names
from torchloom.views.changes import moved
from torchloom.views.format.json_document import plain
from torchloom.views.format.numbers import size
from torchloom.views.format.short_names import name_of
from torchloom.views.format.tables import Screen, clean
from torchloom.views.format.times import stamp
from torchloom.views.member_records import member_sentences
from torchloom.views.run_records import run_sentence
from torchloom.views.wording.phrases import render, render_all


class Event(NamedTuple):
    """One record with where and when it stands in the log."""

    seq: int
    at: float
    term: int
    record: Record


class Teller:
    """Goes through the log in order; remembers which job an incident, change or order is about, as what follows does
    not repeat it."""

    def __init__(self, job: str | None = None) -> None:
        self.job = job
        self._jobs_of: dict[str, frozenset[str]] = {}

    def events(self, seq: int, entry: Entry) -> Iterator[Event]:
        """What is worth telling of one entry: nothing internal, nothing of other jobs if one was asked for."""
        for record in entry.records:
            jobs = self._jobs(record)
            if not isinstance(record, InboxRead) and (self.job is None or self.job in jobs):
                yield Event(seq, entry.at, entry.term, record)

    def _jobs(self, record: Record) -> frozenset[str]:
        match record:
            case JobBegan(job=job) | JobEnded(job=job) | JobForgotten(job=job) | KnobsOffered(job=job):
                return frozenset([job])
            case RankJoined() | RankAttached() | RankLost() | RankFound() | RankDied() | RankLeft() | RankForgotten():
                return frozenset([record.rank.job])
            case CheckpointSaved() | CheckpointFailed() | JobResumed():
                return frozenset([record.rank.job])
            case MemberJoined() | MemberRegrouped() | MemberHealed() | MemberDiscarded():
                return frozenset([record.rank.job])
            case RunSubmitted(job=job, task=task):
                self._jobs_of[job] = frozenset([job, task.part_of or job])
                return self._jobs_of[job]
            case DeviceRegistered(replica=replica):
                return frozenset([replica.job])
            case DeviceMarkedFailed(replicas=replicas):
                return frozenset(replica.job for replica in replicas)
            case IncidentOpened(id=id, job=job):
                self._jobs_of[id] = frozenset([job] if job else [])
                return self._jobs_of[id]
            case ChangeProposed(job=job):
                self._jobs_of[record.change.id] = frozenset([job])
                return self._jobs_of[record.change.id]
            case OrderGiven(id=id, job=job):
                self._jobs_of[id] = frozenset([job])
                return self._jobs_of[id]
            case IncidentAmended(id=id) | ChangeDecided(id=id) | ChangeSettled(id=id) | OrderEnded(id=id):
                return self._jobs_of.get(id, frozenset())
            case _:
                job = getattr(record, "job", "")  # of a run
                return self._jobs_of.get(job, frozenset([job])) if job else frozenset()


def lines(event: Event, screen: Screen) -> list[str]:
    """Usually one line; a rank with several devices has one for each."""
    time = screen.paint(stamp(event.at), "dim")
    style = _style(event.record)
    return [f"{time}  {screen.paint(clean(text), style)}" for text in sentences(event.record)]


def as_object(event: Event) -> dict[str, Any]:
    """For `-o json`: the record's own keys after seq, at and term."""
    record: dict[str, Any] = plain(event.record)
    return {"seq": event.seq, "at": event.at, "term": event.term} | record


def sentences(record: Record) -> list[str]:
    match record:
        case TermBegan(term=term, weaver=weaver):
            return [f"Term {term} began: weaver {weaver} is in charge"]
        case JobBegan(job=job):
            return [f"Job {job} began"]
        case JobEnded(job=job, outcome=outcome, reason=reason):
            return [f"Job {job} {'was ' if outcome == 'stopped' else ''}{outcome}{_because(reason)}"]
        case JobForgotten(job=job):
            return [f"Job {job} forgotten: it ended long ago"]
        case RankJoined(rank=rank, hello=hello):
            where = f"(job {rank.job}, rank {rank.rank} of {hello.world_size}, node {hello.node}, pid {hello.pid})"
            where += "; its steps are counted at its optimizer" if hello.counted else ""
            if not hello.devices:
                return [f"Rank {rank} joined without a device {where}"]
            return [f"Registered device: {device} for replica_id: {rank.replica} {where}" for device in hello.devices]
        case RankAttached(rank=rank):
            return [f"Rank {rank} is attached by its script; its steps are counted no longer"]
        case RankLost(rank=rank, reason=reason, patient=patient):
            return [f"Rank {rank} lost{_because(reason)}{' (it may be frozen, not dead)' if patient else ''}"]
        case RankFound(rank=rank, reason=reason):
            return [f"Rank {rank} found again{_because(reason)}"]
        case RankDied(rank=rank, reason=reason, confirmed=confirmed):
            return [f"Rank {rank} died{_because(reason)}{'' if confirmed else ' (presumed)'}"]
        case RankLeft(rank=rank, how=how):
            return [f"Rank {rank} left: {how}"]
        case RankForgotten(rank=rank):
            return [f"Rank {rank} forgotten: gone for long"]
        case DeviceRegistered(device=device, replica=replica, node=node, operator=operator):
            who = f"by {operator}" if operator else "by hand"
            where = f", node {node}" if node else ""
            return [f"Registered device: {device} for replica_id: {replica.replica} (job {replica.job}{where}, {who})"]
        case DeviceBlamed(device=device, by=by, cause=cause):
            return [f"Device {device} is said to be broken ({by}): {render(cause)}"]
        case DeviceCleared(device=device, by=by):
            return [f"Device {device} is not said to be broken any more by {by}"]
        case DeviceMarkedFailed(device=device, cause=cause, source=source, replicas=replicas):
            hit = f"replicas on it: {', '.join(map(str, replicas))}" if replicas else "no replica is on it"
            return [f"Device {device} failed: {render(cause)} (said by {source}); {hit}"]
        case DeviceMarkedRecovered(device=device, source=source):
            return [f"Device {device} recovered (said by {source})"]
        case IncidentOpened(id=id, what=what, about=about):
            evidence = f" [{'; '.join(render_all(record.evidence))}]" if record.evidence else ""
            return [f"Incident {id} opened: {name_of(about)}: {render(what)}{evidence}{_decided(record)}"]
        case IncidentAmended(id=id, closed=closed, outcome=outcome):
            evidence = f": {'; '.join(render_all(record.evidence))}" if record.evidence else ""
            end = f"; outcome: {render(outcome)}" if outcome else ""
            return [f"Incident {id} {'closed' if closed else 'amended'}{evidence}{_decided(record)}{end}"]
        case KnobsOffered(job=job, knobs=knobs, checkpoints=checkpoints):
            saves = "; it saves checkpoints when asked" if checkpoints else ""
            return [f"Job {job} offers knobs: {', '.join(knob.name for knob in knobs) or 'none'}{saves}"]
        case ChangeProposed(change=change, operator=operator, reverts=reverts):
            moves = moved(change.action, change.values, record.before, change.over)
            undoes = f", reverting {reverts}" if reverts else ""
            where = f"{_target(record)} at step {change.step:,} ({_ranks(len(record.lives))})"
            return [f"Change {change.id} asked by {operator or 'someone'}: {moves} on {where}{undoes}"]
        case ChangeDecided(id=id, commit=commit, abort=abort):
            reason = abort_phrase(abort) if abort is not None else phrase("all_ranks_ready") if commit else ""
            return [f"Change {id} {'decided' if commit else 'was not made'}{_because(reason)}"]
        case ChangeSettled(id=id, outcome=outcome):
            return [f"Change {id} settled: {render(outcome)}"]
        case OrderGiven(id=id, verb=verb, lives=lives, operator=operator):
            return [f"Order {id} given by {operator or 'someone'}: {verb} {names([rank for rank, _ in lives])}"]
        case OrderEnded(id=id, outcome=outcome):
            return [f"Order {id} ended: {render(outcome)}"]
        case CheckpointSaved(rank=rank, step=step, folder=folder, node=node, seconds=seconds, stall=stall):
            took = f"{size(record.size)} in {seconds:.2f} s, training stood still for {stall:.2f} s"
            return [f"Checkpoint of {rank.job} at step {step:,} written to {folder} on {node}: {took}"]
        case CheckpointFailed(rank=rank, step=step, folder=folder, why=why):
            return [f"Checkpoint of {rank.job} at step {step:,} could not be written to {folder}: {why}"]
        case JobResumed(rank=rank, step=step, path=path, rejected=rejected):
            damaged = ", ".join(f"{name} ({why})" for name, why in rejected.items())
            newer = f"; newer ones are damaged: {damaged}" if damaged else ""
            return [f"Job {rank.job} resumed at step {step:,} from {path} (rank {rank.replica}/{rank.rank}){newer}"]
        case MemberJoined() | MemberRegrouped() | MemberHealed() | MemberDiscarded() | MembersEvicted():
            return member_sentences(record)
        case InboxRead(seq=seq):
            return [f"Inbox read up to {seq}"]
        case _:
            return [run_sentence(record)]


def _because(reason: Prose) -> str:
    return f": {render(reason)}" if reason else ""


def _target(record: ChangeProposed) -> str:
    return "/".join(str(part) for part in (record.job, record.replica, record.rank) if part is not None)


def _ranks(count: int) -> str:
    return f"{count:,} rank{'' if count == 1 else 's'}"


def _decided(record: IncidentOpened | IncidentAmended) -> str:
    if not record.decision:
        return ""
    return f"; decided: {render(record.decision)}" + (f" ({render(record.reason)})" if record.reason else "")


def _style(record: Record) -> str:
    match record:
        case RankDied() | DeviceMarkedFailed() | IncidentOpened():
            return "red"
        case MembersEvicted() | MemberDiscarded():
            return "yellow"
        case RankLost() | ChangeDecided(commit=False) | CheckpointFailed() | AttemptStopping() | ResponseBegan():
            return "yellow"
        case RankFound() | DeviceMarkedRecovered():
            return "green"
        case JobEnded(outcome=outcome):
            return "" if outcome == "finished" else "red" if outcome == "failed" else "yellow"
        case _:
            return ""
