"""One incident, and its timeline: what was decided and done about it, and what it cost, as the records of the log say.

The timeline is short: its beginning and its latest entries. Everything here is part of the fold.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
from msgspec.structs import replace

from torchloom.protocol.ids import ReplicaId
from torchloom.protocol.incident_records import About, IncidentAmended, ResponseBegan, ResponseWent
from torchloom.protocol.phrase import Phrase, Prose, phrase
from torchloom.protocol.records import JobResumed, Record
from torchloom.protocol.run_records import AttemptBegan, AttemptEnded, AttemptLaunched, AttemptRunning

if TYPE_CHECKING:
    from torchloom.core.state.runs import Run, Runs

KEPT = 20
MOST = 300
"""Characters of one entry."""
DECIDED, BEGINS = "decided", "response_begins"
"""Entries that tell of a decision, and of a response."""


class Incident(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that went wrong: cause, evidence, decision, and what happened then."""

    id: str
    opened: float
    what: Prose
    about: About
    job: str = ""
    affected: tuple[ReplicaId, ...] = ()
    culprits: tuple[int, ...] = ()
    checkpoints: tuple[str, ...] = ()
    errors: tuple[str, ...] = ()
    """Of checkpoints that could not be written: which the evidence tells of."""
    stacks_from: tuple[str, ...] = ()
    """Nodes whose agents have told where their ranks were."""
    evidence: tuple[Prose, ...] = ()
    decision: Prose = ""
    reason: Prose = ""
    outcome: Prose = ""
    closed: float | None = None
    kind: str = ""
    history: tuple[tuple[float, Prose], ...] = ()
    """What was decided and done about it, and when."""
    stopped: tuple[str, int] | None = None
    """The job and the attempt of it that was ended for this."""
    step: int = 0
    """How far that had come."""
    lost_steps: int | None = None
    lost_seconds: float | None = None


def noted(incident: Incident, at: float, entry: Prose) -> Incident:
    """With one more entry, unless the last one says the same."""
    if isinstance(entry, str) and len(entry) > MOST:
        entry = f"{entry[: MOST - 1]}…"
    if not entry or (incident.history and incident.history[-1][1] == entry):
        return incident
    history = (*incident.history, (at, entry))
    if len(history) > KEPT:
        history = (history[0], *history[1 - KEPT :])
    return replace(incident, history=history)


def opened(incident: Incident, at: float) -> Incident:
    return noted(incident, at, phrase(DECIDED, decision=incident.decision)) if incident.decision else incident


def amended(incident: Incident, record: IncidentAmended, at: float) -> Incident:
    """With what the record adds. Of evidence only what is news by itself, not stacks and how a rank ended."""
    if len(record.evidence) == 1 and not record.decision and record.stacks is None:
        incident = noted(incident, at, record.evidence[0])
    last = incident.history[-1][1] if incident.history else ""
    begins = isinstance(last, Phrase) and last.code == BEGINS  # which says it already
    if record.decision and record.decision != incident.decision and not begins:
        incident = noted(incident, at, phrase(DECIDED, decision=record.decision))
    if record.outcome:
        incident = noted(incident, at, phrase("over" if record.closed else "so_far", outcome=record.outcome))
    return incident


def stopped(incident: Incident, run: Run, at: float) -> Incident:
    """The attempt under way was ended for it."""
    step = run.note.step
    kind = incident.kind or ("crash" if cause_of(incident) == "crash" else "")  # what began as a lost link
    incident = replace(incident, stopped=(run.name, run.attempt), step=step, kind=kind)
    return noted(incident, at, phrase("attempt_stopped", attempt=run.ordinal, step=step or None))


def cause_of(incident: Incident) -> str:
    """Under what the time is accounted that it costs."""
    if incident.kind:
        return incident.kind
    return "node" if incident.about.run and not incident.about.part else "crash"


def follow(incidents: dict[str, Incident], runs: Runs, record: Record, at: float) -> None:
    """Let a record of a run be told by the incidents it has to do with. The runs are those before the record."""
    match record:
        case ResponseBegan(job=job, incident=id, do=do, rollback=back):
            if id in incidents:
                whose = "" if incidents[id].job == job else job
                incidents[id] = noted(incidents[id], at, phrase(BEGINS, do=do, job=whose))
                if back is not None and back.skip is not None:
                    first, last = back.skip
                    code = "batch_skipped" if first == last else "batches_skipped"
                    incidents[id] = noted(incidents[id], at, phrase(code, first=first, last=last))
        case ResponseWent(job=job, left=left):
            response = runs.by_name[job].response
            if response is not None and response.incident in incidents:
                known, done = incidents[response.incident], response.do[: len(response.do) - len(left)]
                code = "response_done" if known.closed is None else "response_undone"
                incidents[response.incident] = noted(known, at, phrase(code, do=done))
        case AttemptEnded(job=job, attempt=attempt, wait_seconds=wait) if wait:
            _tell(incidents, job, attempt, at, phrase("next_attempt_waits", seconds=wait))
        case AttemptBegan(job=job, attempt=attempt, places=places):
            nodes = tuple(dict.fromkeys(place.node for place in places))
            number = attempt - runs.by_name[job].before
            if number > 1:
                _tell(incidents, job, attempt - 1, at, phrase("attempt_prepared", attempt=number, nodes=nodes))
        case AttemptLaunched(job=job, attempt=attempt, heals=True) if runs.by_name[job].ordinal > 1:
            _tell(incidents, job, attempt - 1, at, phrase("heals"))
            for incident in [i for i in incidents.values() if i.stopped == (job, attempt - 1)]:
                incidents[incident.id] = replace(incident, lost_steps=0)
        case AttemptLaunched(job=job, attempt=attempt, resume=resume, resume_step=step) if (
            runs.by_name[job].ordinal > 1
        ):
            where = phrase("starts_over" if step is None else "resumes_at", step=step, path=resume)
            _tell(incidents, job, attempt - 1, at, where)
            _count(incidents, job, attempt - 1, step or 0)
        case JobResumed(rank=rank, step=step):
            run = runs.of(rank.replica_id)
            if run is not None and run.ordinal > 1:
                _count(incidents, run.name, run.attempt - 1, step)
        case AttemptRunning(job=job):
            for incident in _unmended(incidents, job, runs.by_name[job].before):
                seconds = max(0.0, at - incident.opened)
                incidents[incident.id] = replace(incident, lost_seconds=seconds)


def _unmended(incidents: dict[str, Incident], job: str, before: int) -> list[Incident]:
    """Those for which an attempt of this run was ended, and that wait for the next one to run."""
    waiting = [i for i in incidents.values() if i.stopped is not None and i.lost_seconds is None]
    return [i for i in waiting if i.stopped is not None and i.stopped[0] == job and i.stopped[1] > before]


def _tell(incidents: dict[str, Incident], job: str, attempt: int, at: float, text: Prose) -> None:
    for incident in [i for i in incidents.values() if i.stopped == (job, attempt)]:
        incidents[incident.id] = noted(incident, at, text)


def _count(incidents: dict[str, Incident], job: str, attempt: int, step: int) -> None:
    """The steps since the one that it goes on from are lost."""
    for incident in [i for i in incidents.values() if i.stopped == (job, attempt)]:
        incidents[incident.id] = replace(incident, lost_steps=max(0, incident.step - step))
