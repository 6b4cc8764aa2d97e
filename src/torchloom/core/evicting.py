"""A device has failed: what that means for the jobs whose ranks are on it."""

from __future__ import annotations

from torchloom.core.decision import Decision, together
from torchloom.core.fabric import Fabric
from torchloom.core.responding import Trouble, respond
from torchloom.core.running import UNDER_WAY
from torchloom.core.runs import Run
from torchloom.messages import DeviceMarkedFailed, IncidentOpened


def with_eviction(fabric: Fabric, failed: Decision, now: float) -> Decision:
    """The decision that a device failed, and what the policy of each job on it says."""
    marked = next((record for record in failed.records if isinstance(record, DeviceMarkedFailed)), None)
    opened = next((record for record in failed.records if isinstance(record, IncidentOpened)), None)
    if marked is None or opened is None:
        return failed
    decisions = [failed]
    for job in dict.fromkeys(replica.job for replica in marked.replicas):
        run = fabric.runs.active(job)
        if run is not None and run.phase in UNDER_WAY:
            reason = f"device {marked.device} failed: {marked.cause}"
            trouble = Trouble("device", opened.id, reason, _on(fabric, run, marked.device), fabric.furthest(run))
            decisions.append(respond(fabric, run, trouble, now))
    whole = together(decisions)
    return Decision(
        whole.records, whole.commands, failed.answer, whole.reason, whole.notes, whole.replies, whole.verdicts,
        whole.tasks,
    )  # fmt: skip


def _on(fabric: Fabric, run: Run, device: str) -> tuple[int, ...]:
    """The ranks of a run that compute on it."""
    placed = {at.rank for at in run.places if at.device == device}
    told = {rank.rank for rank in fabric.ranks_of_job.get(run.job, ()) if device in fabric.ranks[rank].devices}
    return tuple(sorted(placed | told))
