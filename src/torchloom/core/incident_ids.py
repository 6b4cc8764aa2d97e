"""Ids of incidents: assigned in one place, when a decision is complete.

Several parts of one decision may open incidents, and refer to them, independently. Each uses a provisional id that is
unique within the decision; `number_incidents` replaces it by the next number, wherever it occurs.
"""

from __future__ import annotations

from dataclasses import replace as replace_decision

from msgspec.structs import replace

from torchloom.core.decision import Decision
from torchloom.core.state.pending_operations import Volatile
from torchloom.protocol.node import Inspect, Rollback
from torchloom.protocol.phrase import Prose
from torchloom.protocol.records import IncidentAmended, IncidentOpened, OrderGiven, Record
from torchloom.protocol.run_records import AttemptStopping, ResponseBegan


def provisional(*key: object) -> str:
    """An id that is valid until the decision is complete."""
    return f"new: {' '.join(map(str, key))}"


def close_incident(id: str, outcome: Prose) -> IncidentAmended:
    return IncidentAmended(id=id, outcome=outcome, closed=True)


def number_incidents(decision: Decision, count: int) -> Decision:
    """Give the incidents that a decision opens the numbers after `count`."""
    opened = [record.id for record in decision.records if isinstance(record, IncidentOpened)]
    if not opened:
        return decision
    ids = {id: f"i{number}" for number, id in enumerate(opened, count + 1)}
    assert len(ids) == len(opened), f"two incidents have one provisional id: {opened}"
    return replace_decision(
        decision,
        records=tuple(_numbered(record, ids) for record in decision.records),
        tasks=tuple(
            (node, replace(task, incident=ids.get(task.incident, task.incident)) if isinstance(task, Inspect) else task)
            for node, task in decision.tasks
        ),
    )


def _numbered(record: Record | Volatile, ids: dict[str, str]) -> Record | Volatile:
    match record:
        case IncidentOpened(id=id) | IncidentAmended(id=id):
            return replace(record, id=ids.get(id, id))
        case AttemptStopping(incident=id, rollback=back) | ResponseBegan(incident=id, rollback=back):
            return replace(record, incident=ids.get(id, id), rollback=_numbered_rollback(back, ids))
        case OrderGiven(incident=id):
            return replace(record, incident=ids.get(id, id))
    return record


def _numbered_rollback(back: Rollback | None, ids: dict[str, str]) -> Rollback | None:
    return None if back is None else replace(back, incident=ids.get(back.incident, back.incident))
