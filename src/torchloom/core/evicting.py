"""A device has failed, or is not well: what that means for the jobs whose ranks are on it."""

from __future__ import annotations

from dataclasses import replace

import msgspec

from torchloom.core.decision import NOTHING, Decision, together
from torchloom.core.fabric import Fabric
from torchloom.core.responding import Trouble, respond
from torchloom.core.running import UNDER_WAY
from torchloom.core.runs import Run
from torchloom.messages import EventKind, IncidentAmended, IncidentOpened


def with_responses(fabric: Fabric, told: Decision, device: str, now: float) -> Decision:
    """A decision that opens an incident about a device, and what the policy of each job on it says."""
    opened = next((record for record in told.records if isinstance(record, IncidentOpened)), None)
    if opened is None:
        return told
    kind: EventKind = "device_warning" if opened.kind == "device_warning" else "device"
    responses: dict[str, Decision] = {}
    for job in dict.fromkeys(replica.job for replica in fabric.drmap.replicas_on(device)):
        run = fabric.runs.active(job)
        if run is not None and run.phase in UNDER_WAY:
            trouble = Trouble(kind, opened.id, opened.what, _on(fabric, run, device), fabric.furthest(run))
            responses[job] = respond(fabric, run, trouble, now)
    said = {job: _said(decision, opened.id) for job, decision in responses.items()}
    sentence = "; ".join(f"{job}: {text}" for job, text in said.items() if text)
    rest = [_without(decision, opened.id) for decision in responses.values()]
    summary = Decision((IncidentAmended(id=opened.id, decision=sentence),)) if sentence else NOTHING
    return replace(together([told, *rest, summary]), answer=told.answer)


def _said(decision: Decision, incident: str) -> str:
    """What was decided for one job."""
    mine = [r.decision for r in decision.records if isinstance(r, IncidentAmended) and r.id == incident]
    return next((text for text in reversed(mine) if text), "")


def _without(decision: Decision, incident: str) -> Decision:
    """Without the words about it: one sentence for all jobs follows."""
    records = tuple(
        msgspec.structs.replace(record, decision="")
        if isinstance(record, IncidentAmended) and record.id == incident
        else record
        for record in decision.records
    )
    return replace(decision, records=records)


def _on(fabric: Fabric, run: Run, device: str) -> tuple[int, ...]:
    """The ranks of a run that compute on it."""
    placed = {at.rank for at in run.places if at.device == device}
    told = {rank.rank for rank in fabric.ranks_of_job.get(run.job, ()) if device in fabric.ranks[rank].devices}
    return tuple(sorted(placed | told))
