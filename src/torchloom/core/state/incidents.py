"""What went wrong: each incident once, the open ones of a job at hand, and of the closed ones the latest."""

from __future__ import annotations

from collections.abc import Iterable

from msgspec.structs import replace

from torchloom.core.state.incident import Incident, amended, opened
from torchloom.protocol.incident_records import IncidentAmended, IncidentOpened

MOST_EVIDENCE = 50


class Incidents(dict[str, Incident]):
    """By id, the oldest first."""

    def __init__(self, known: Iterable[Incident] = (), count: int = 0) -> None:
        super().__init__({incident.id: incident for incident in known})
        self.count = count
        """How many there ever were."""
        self._open_of: dict[str, dict[str, None]] = {}
        """By job: the ids of its open ones, oldest first."""
        for incident in self.values():
            if incident.closed is None:
                self._open_of.setdefault(incident.job, {})[incident.id] = None

    def open_of(self, job: str) -> list[Incident]:
        """Those of a job, or of none; oldest first."""
        return [self[id] for id in self._open_of.get(job, ())]

    def open(self, record: IncidentOpened, at: float) -> None:
        self.count += 1
        incident = Incident(
            id=record.id,
            opened=at,
            what=record.what,
            about=record.about,
            job=record.job,
            affected=record.affected,
            culprits=record.culprits,
            checkpoints=record.checkpoints,
            errors=record.errors,
            evidence=record.evidence,
            decision=record.decision,
            reason=record.reason,
            kind=record.kind,
        )
        self[record.id] = opened(incident, at)
        self._open_of.setdefault(record.job, {})[record.id] = None

    def amend(self, record: IncidentAmended, at: float, keep_closed: int) -> None:
        """What is known of it already is not lost; of those that are closed so many are kept."""
        incident = self[record.id]
        self[record.id] = replace(
            amended(incident, record, at),
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
            mine = self._open_of.get(incident.job, {})
            mine.pop(incident.id, None)
            if not mine:
                self._open_of.pop(incident.job, None)
            closed = [i for i in self.values() if i.closed is not None]
            for old in closed[: max(0, len(closed) - keep_closed)]:
                del self[old.id]
