"""Responses to a failed or ailing device, for the jobs whose ranks use it."""

from __future__ import annotations

from dataclasses import replace

import msgspec

from torchloom.core.decision import NOTHING, Decision, merge_decisions
from torchloom.core.incidents.circuit_breaker import braked
from torchloom.core.incidents.responses import Trouble, respond
from torchloom.core.state.cluster import ClusterState
from torchloom.core.state.presence import PRESENT
from torchloom.core.state.runs import Run
from torchloom.core.torchft.members import evict
from torchloom.protocol.ids import ReplicaId
from torchloom.protocol.incident_records import IncidentAmended, IncidentOpened
from torchloom.protocol.job import EventKind
from torchloom.protocol.phrase import Prose, phrase


def respond_to_failure(cluster: ClusterState, told: Decision, device: str, now: float) -> Decision:
    """Add to a decision that opens an incident about a device what the policy of each job on it responds."""
    opened = next((record for record in told.records if isinstance(record, IncidentOpened)), None)
    if opened is None:
        return told
    kind: EventKind = "device_warning" if opened.kind == "device_warning" else "device"
    responses: dict[str, Decision] = {}
    theirs: dict[ReplicaId, Decision] = {}
    for replica in cluster.drmap.replicas_on(device):
        run = cluster.runs.of(replica) or cluster.runs.active(replica.job)
        if run is not None and run.under_way and run.name not in responses:
            trouble = Trouble(kind, opened.id, opened.what, _on(cluster, run, device), cluster.furthest(run))
            responses[run.name] = respond(cluster, run, trouble, now)
        elif run is None and kind == "device":
            theirs[replica] = _out_of_quorum(cluster, replica, opened.what, now)
    said = {job: _said(decision, opened.id) for job, decision in responses.items()}
    said |= {str(replica): phrase("evicted_from_quorum") for replica, decision in theirs.items() if decision}
    parts = [phrase("decided_for", job=name, decision=text) for name, text in said.items() if text]
    sentence = phrase("together", parts=parts) if parts else ""
    rest = [*(_without(decision, opened.id) for decision in responses.values()), *theirs.values()]
    summary = Decision((IncidentAmended(id=opened.id, decision=sentence),)) if sentence else NOTHING
    return replace(merge_decisions([told, *rest, summary]), answer=told.answer)


def _out_of_quorum(cluster: ClusterState, replica: ReplicaId, reason: Prose, now: float) -> Decision:
    """Of a replica that torchLoom did not start: it can only make the rest of its job not wait for it."""
    if replica.job not in cluster.runtime.lighthouses or braked(cluster, now):
        return NOTHING
    ranks = cluster.ranks.of_replica(replica)
    return evict(cluster, replica.job, (rank.member for rank in ranks if rank.presence in PRESENT), reason)


def _said(decision: Decision, incident: str) -> Prose:
    """The decision for one job."""
    mine = [r.decision for r in decision.records if isinstance(r, IncidentAmended) and r.id == incident]
    return next((text for text in reversed(mine) if text), "")


def _without(decision: Decision, incident: str) -> Decision:
    """Remove the decisions for single jobs: one decision for all jobs follows."""
    records = tuple(
        msgspec.structs.replace(record, decision="")
        if isinstance(record, IncidentAmended) and record.id == incident
        else record
        for record in decision.records
    )
    return replace(decision, records=records)


def _on(cluster: ClusterState, run: Run, device: str) -> tuple[int, ...]:
    """The ranks of a run that use a device."""
    placed = {at.rank for at in run.places if at.device == device}
    told = {rank.rank for rank in cluster.ranks_of(run) if device in cluster.ranks[rank].devices}
    return tuple(sorted(placed | told))
