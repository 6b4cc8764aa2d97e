"""Incidents: what went wrong, what was decided and done about it, and what it cost, as the records of the log say.

Each has a short timeline: its first entry and the latest ones. All open incidents are kept, and the latest closed ones.
"""

from __future__ import annotations

from collections.abc import Iterable

from msgspec.structs import replace

from torchloom.core.state.run_states import Run, Runs
from torchloom.protocol import run_records
from torchloom.protocol.phrase import Phrase, Prose, phrase
from torchloom.protocol.rank import JobResumed
from torchloom.protocol.records import About, IncidentAmended, IncidentOpened

MOST_ENTRIES = 20
"""Of one timeline."""
LONGEST_ENTRY = 300
"""Characters."""
MOST_EVIDENCE = 50
DECIDED, BEGINS = "decided", "response_begins"
"""Codes of the entries about a decision and about a response."""


class Incident(IncidentOpened, frozen=True, kw_only=True):
    """One thing that went wrong, as it was opened, and what happened then."""

    opened: float
    stacks_from: tuple[str, ...] = ()
    """Nodes whose agents have sent the stacks of their ranks."""
    outcome: Prose = ""
    closed: float | None = None
    history: tuple[tuple[float, Prose], ...] = ()
    """The timeline: when, and what was decided or done."""
    stopped: tuple[str, int] | None = None
    """The run and its attempt that were stopped because of this."""
    step: int = 0
    """The step that this attempt had reached."""
    lost_steps: int | None = None
    lost_seconds: float | None = None


def cause_of(incident: Incident) -> str:
    """The cause under which goodput accounts for the time that it costs."""
    if incident.kind:
        return incident.kind
    return "node" if incident.about.run and not incident.about.part else "crash"


def _append(incident: Incident, at: float, entry: Prose) -> Incident:
    """Add an entry to the timeline, unless it repeats the last one."""
    if isinstance(entry, str) and len(entry) > LONGEST_ENTRY:
        entry = f"{entry[: LONGEST_ENTRY - 1]}…"
    if not entry or (incident.history and incident.history[-1][1] == entry):
        return incident
    history = (*incident.history, (at, entry))
    if len(history) > MOST_ENTRIES:
        history = (history[0], *history[1 - MOST_ENTRIES :])
    return replace(incident, history=history)


def _append_amendment(incident: Incident, record: IncidentAmended, at: float) -> Incident:
    """Of the evidence only what is news by itself, not stacks and how a rank ended."""
    if len(record.evidence) == 1 and not record.decision and record.stacks is None:
        incident = _append(incident, at, record.evidence[0])
    last = incident.history[-1][1] if incident.history else ""
    begins = isinstance(last, Phrase) and last.code == BEGINS  # which contains the decision
    if record.decision and record.decision != incident.decision and not begins:
        incident = _append(incident, at, phrase(DECIDED, decision=record.decision))
    if record.outcome:
        incident = _append(incident, at, phrase("over" if record.closed else "so_far", outcome=record.outcome))
    return incident


class Incidents(dict[str, Incident]):
    """By id, the oldest first."""

    def __init__(self, incidents: Iterable[Incident] = (), count: int = 0) -> None:
        super().__init__({incident.id: incident for incident in incidents})
        self.count = count
        """Of all incidents ever opened."""
        self._open_ids: dict[str, dict[str, None]] = {}
        """By job: the ids of its open ones, oldest first."""
        for incident in self.values():
            if incident.closed is None:
                self._open_ids.setdefault(incident.job, {})[incident.id] = None

    def open_of(self, job: str) -> list[Incident]:
        """Open incidents of a job, or ("") of none; oldest first."""
        return [self[id] for id in self._open_ids.get(job, ())]

    def find_open(self, job: str, about: About) -> Incident | None:
        return next((incident for incident in self.open_of(job) if incident.about == about), None)

    # ── fold ──

    def open(self, record: IncidentOpened, at: float) -> None:
        self.count += 1
        incident = Incident.from_fields(record, opened=at)
        entry = phrase(DECIDED, decision=record.decision) if record.decision else ""
        self[record.id] = _append(incident, at, entry)
        self._open_ids.setdefault(record.job, {})[record.id] = None

    def amend(self, record: IncidentAmended, at: float, keep_closed: int) -> None:
        """Add to what is recorded of an incident. At most `keep_closed` closed incidents are kept."""
        incident = self[record.id]
        self[record.id] = replace(
            _append_amendment(incident, record, at),
            evidence=(*incident.evidence, *record.evidence)[-MOST_EVIDENCE:],
            decision=record.decision or incident.decision,
            reason=record.reason or incident.reason,
            outcome=record.outcome or incident.outcome,
            closed=at if record.closed else incident.closed,
            culprits=(*incident.culprits, *record.culprits),
            errors=(*incident.errors, *record.errors),
            stacks_from=(*incident.stacks_from, *([record.stacks] if record.stacks else [])),
        )
        if record.closed:
            open_ids = self._open_ids.get(incident.job, {})
            open_ids.pop(incident.id, None)
            if not open_ids:
                self._open_ids.pop(incident.job, None)
            closed = [i for i in self.values() if i.closed is not None]
            for old in closed[: max(0, len(closed) - keep_closed)]:
                del self[old.id]

    def append(self, id: str, at: float, entry: Prose) -> None:
        """Add an entry to the timeline of an incident, if it is still kept."""
        if id in self:
            self[id] = _append(self[id], at, entry)

    def record_stop(self, id: str, run: Run, at: float) -> Incident:
        """The attempt under way was stopped because of this incident."""
        incident, step = self[id], run.note.step
        kind = incident.kind or ("crash" if cause_of(incident) == "crash" else "")  # it began as a closed link
        self[id] = replace(incident, stopped=(run.name, run.attempt), step=step, kind=kind)
        self.append(id, at, phrase("attempt_stopped", attempt=run.ordinal, step=step or None))
        return self[id]

    def follow_resume(self, record: JobResumed, runs: Runs) -> None:
        run = runs.of(record.rank.replica_id)
        if run is not None and run.ordinal > 1:
            self._count_lost_steps(run.name, run.attempt - 1, record.step)

    def follow_run(self, record: run_records.RunRecord, runs: Runs, at: float) -> None:
        """Add a record of a run to the timelines that it concerns. `runs` is the state before the record."""
        match record:
            case run_records.ResponseBegan(job=job, incident=id, do=do, rollback=back) if id in self:
                self.append(id, at, phrase(BEGINS, do=do, job="" if self[id].job == job else job))
                if back is not None and back.skip is not None:
                    first, last = back.skip
                    code = "batch_skipped" if first == last else "batches_skipped"
                    self.append(id, at, phrase(code, first=first, last=last))
            case run_records.ResponseWent(job=job, left=left):
                response = runs.by_name[job].response
                if response is not None and response.incident in self:
                    code = "response_done" if self[response.incident].closed is None else "response_undone"
                    done = response.do[: len(response.do) - len(left)]
                    self.append(response.incident, at, phrase(code, do=done))
            case run_records.AttemptEnded(job=job, attempt=attempt, wait_seconds=wait) if wait:
                self._append_to_stopped(job, attempt, at, phrase("next_attempt_waits", seconds=wait))
            case run_records.AttemptBegan(job=job, attempt=attempt, places=places):
                nodes = tuple(dict.fromkeys(place.node for place in places))
                number = attempt - runs.by_name[job].before
                if number > 1:
                    entry = phrase("attempt_prepared", attempt=number, nodes=nodes)
                    self._append_to_stopped(job, attempt - 1, at, entry)
            case run_records.AttemptLaunched(job=job, attempt=attempt, resume=resume, resume_step=step):
                if runs.by_name[job].ordinal > 1:
                    start = phrase("starts_over" if step is None else "resumes_at", step=step, path=resume)
                    self._append_to_stopped(job, attempt - 1, at, phrase("heals") if record.heals else start)
                    self._count_lost_steps(job, attempt - 1, None if record.heals else step or 0)
            case run_records.AttemptRunning(job=job):
                for incident in list(self.values()):
                    name, attempt = incident.stopped or ("", 0)
                    if name == job and attempt > runs.by_name[job].before and incident.lost_seconds is None:
                        self[incident.id] = replace(incident, lost_seconds=max(0.0, at - incident.opened))

    def _stopped(self, job: str, attempt: int) -> list[Incident]:
        return [incident for incident in self.values() if incident.stopped == (job, attempt)]

    def _append_to_stopped(self, job: str, attempt: int, at: float, entry: Prose) -> None:
        for incident in self._stopped(job, attempt):
            self.append(incident.id, at, entry)

    def _count_lost_steps(self, job: str, attempt: int, resumed: int | None) -> None:
        """The steps after the one that training resumes from are lost; none (None) if a replica heals from peers."""
        for incident in self._stopped(job, attempt):
            lost = 0 if resumed is None else max(0, incident.step - resumed)
            self[incident.id] = replace(incident, lost_steps=lost)
