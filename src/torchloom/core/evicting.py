"""A device has failed: what that means for the jobs whose ranks are on it."""

from __future__ import annotations

from dataclasses import replace

import msgspec

from torchloom.core.decision import NOTHING, Decision, together
from torchloom.core.fabric import Fabric
from torchloom.core.responding import Trouble, respond
from torchloom.core.running import UNDER_WAY
from torchloom.core.runs import Run
from torchloom.messages import DeviceMarkedFailed, IncidentAmended, IncidentOpened


def with_eviction(fabric: Fabric, failed: Decision, now: float) -> Decision:
    """The decision that a device failed, and what the policy of each job on it says."""
    marked = next((record for record in failed.records if isinstance(record, DeviceMarkedFailed)), None)
    opened = next((record for record in failed.records if isinstance(record, IncidentOpened)), None)
    if marked is None or opened is None:
        return failed
    responses: dict[str, Decision] = {}
    for job in dict.fromkeys(replica.job for replica in marked.replicas):
        run = fabric.runs.active(job)
        if run is not None and run.phase in UNDER_WAY:
            reason = f"device {marked.device} failed: {marked.cause}"
            trouble = Trouble("device", opened.id, reason, _on(fabric, run, marked.device), fabric.furthest(run))
            responses[job] = respond(fabric, run, trouble, now)
    said = {job: _said(decision, opened.id) for job, decision in responses.items()}
    told = "; ".join(f"{job}: {text}" for job, text in said.items() if text)
    rest = [_without(decision, opened.id) for decision in responses.values()]
    summary = Decision((IncidentAmended(id=opened.id, decision=told),)) if told else NOTHING
    whole = together([failed, *rest, summary])
    return Decision(
        whole.records, whole.commands, failed.answer, whole.reason, whole.notes, whole.replies, whole.verdicts,
        whole.tasks,
    )  # fmt: skip


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
