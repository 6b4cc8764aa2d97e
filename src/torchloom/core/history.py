"""The story of an incident, told by the records of the log: what was decided and done about it, and what it cost.

It is short: the beginning and the latest of it. Everything here is part of the fold.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec.structs import replace

from torchloom.messages import (
    AttemptBegan,
    AttemptEnded,
    AttemptLaunched,
    AttemptRunning,
    IncidentAmended,
    JobResumed,
    Record,
    ResponseBegan,
    ResponseWent,
)

if TYPE_CHECKING:
    from torchloom.core.incidents import Incident
    from torchloom.core.runs import Run, Runs

KEPT = 20
MOST = 300
"""Characters of one entry."""
DECIDED, BEGINS = "decided: ", "begins: "
"""How an entry begins that tells of a decision, and of a response."""


def noted(incident: Incident, at: float, text: str) -> Incident:
    """With one more entry, unless the last one says the same."""
    text = text if len(text) <= MOST else f"{text[: MOST - 1]}…"
    if not text or (incident.history and incident.history[-1][1] == text):
        return incident
    history = (*incident.history, (at, text))
    if len(history) > KEPT:
        history = (history[0], *history[1 - KEPT :])
    return replace(incident, history=history)


def opened(incident: Incident, at: float) -> Incident:
    return noted(incident, at, f"{DECIDED}{incident.decision}") if incident.decision else incident


def amended(incident: Incident, record: IncidentAmended, at: float) -> Incident:
    """With what the record adds. Of evidence only what is news by itself, not stacks and how a rank ended."""
    if len(record.evidence) == 1 and not record.decision and "\n" not in record.evidence[0]:
        incident = noted(incident, at, record.evidence[0])
    begins = bool(incident.history) and incident.history[-1][1].startswith(BEGINS)  # which says it already
    if record.decision and record.decision != incident.decision and not begins:
        incident = noted(incident, at, f"{DECIDED}{record.decision}")
    if record.outcome:
        incident = noted(incident, at, f"{'over' if record.closed else 'so far'}: {record.outcome}")
    return incident


def stopped(incident: Incident, run: Run, at: float) -> Incident:
    """The attempt under way was ended for it."""
    step = run.note.step
    at_step = f" at step {step:,}" if step else ""
    kind = incident.kind or ("crash" if cause_of(incident) == "crash" else "")  # what began as a lost link
    incident = replace(incident, stopped=(run.job, run.attempt), step=step, kind=kind)
    return noted(incident, at, f"all ranks of attempt {run.ordinal} are ended{at_step}")


def cause_of(incident: Incident) -> str:
    """Under what the time is accounted that it costs."""
    if incident.kind:
        return incident.kind
    return "node" if incident.subject.endswith("#run") else "crash"


def follow(incidents: dict[str, Incident], runs: Runs, record: Record, at: float) -> None:
    """Let a record of a run be told by the incidents it has to do with. The runs are those before the record."""
    match record:
        case ResponseBegan(job=job, incident=id, do=do, rollback=back):
            if id in incidents:
                whose = "" if incidents[id].job == job else f" ({job})"
                incidents[id] = noted(incidents[id], at, f"{BEGINS}{', then '.join(do)}{whose}")
                if back is not None and back.skip is not None:
                    first, last = back.skip
                    steps = f"step {first:,}" if first == last else f"steps {first:,} to {last:,}"
                    incidents[id] = noted(
                        incidents[id], at, f"batches of {steps} are left out, where loom.batches() is used"
                    )
        case ResponseWent(job=job, left=left):
            response = runs.by_job[job].response
            if response is not None and response.incident in incidents:
                known, done = incidents[response.incident], response.do[: len(response.do) - len(left)]
                word = "done" if known.closed is None else "left undone"
                incidents[response.incident] = noted(known, at, f"{word}: {', '.join(done)}")
        case AttemptEnded(job=job, attempt=attempt, wait_seconds=wait) if wait:
            _tell(incidents, job, attempt, at, f"the next attempt waits {wait:g} s")
        case AttemptBegan(job=job, attempt=attempt, places=places):
            nodes = ", ".join(dict.fromkeys(place.node for place in places))
            number = attempt - runs.by_job[job].before
            if number > 1:
                _tell(incidents, job, attempt - 1, at, f"attempt {number} is prepared on {nodes}")
        case AttemptLaunched(job=job, attempt=attempt, heals=True) if runs.by_job[job].ordinal > 1:
            _tell(incidents, job, attempt - 1, at, "it heals from the others")
            for incident in [i for i in incidents.values() if i.stopped == (job, attempt - 1)]:
                incidents[incident.id] = replace(incident, lost_steps=0)
        case AttemptLaunched(job=job, attempt=attempt, resume=resume, resume_step=step) if runs.by_job[job].ordinal > 1:
            where = f"goes on from step {step:,}" if step is not None else "begins anew"
            source = f" ({resume})" if resume else ""
            _tell(incidents, job, attempt - 1, at, f"it {where}{source}")
            _count(incidents, job, attempt - 1, step or 0)
        case JobResumed(rank=rank, step=step):
            run = runs.of(rank.of)
            if run is not None and run.ordinal > 1:
                _count(incidents, run.job, run.attempt - 1, step)
        case AttemptRunning(job=job):
            for incident in _unmended(incidents, job, runs.by_job[job].before):
                seconds = max(0.0, at - incident.opened)
                incidents[incident.id] = replace(incident, lost_seconds=seconds)


def _unmended(incidents: dict[str, Incident], job: str, before: int) -> list[Incident]:
    """Those for which an attempt of this run was ended, and that wait for the next one to run."""
    waiting = [i for i in incidents.values() if i.stopped is not None and i.lost_seconds is None]
    return [i for i in waiting if i.stopped is not None and i.stopped[0] == job and i.stopped[1] > before]


def _tell(incidents: dict[str, Incident], job: str, attempt: int, at: float, text: str) -> None:
    for incident in [i for i in incidents.values() if i.stopped == (job, attempt)]:
        incidents[incident.id] = noted(incident, at, text)


def _count(incidents: dict[str, Incident], job: str, attempt: int, step: int) -> None:
    """The steps since the one that it goes on from are lost."""
    for incident in [i for i in incidents.values() if i.stopped == (job, attempt)]:
        incidents[incident.id] = replace(incident, lost_steps=max(0, incident.step - step))
