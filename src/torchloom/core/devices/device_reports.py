"""Reports that a device has failed or works again, how its jobs respond, and devices that operators register.

Several sources may report a device failed: alerts, an agent, an operator. Each can withdraw only its own report; the
device works again when none is left. An operator overrules all of them: an overruled alert may still be repeated by its
source, and is ignored until it fires again.
"""

from __future__ import annotations

from dataclasses import replace

from msgspec.structs import replace as replace_fields

from torchloom.core.changes.requests import did_you_mean
from torchloom.core.decision import NOTHING, Decision, Handlers, Refused, close_incident, merge_decisions, provisional
from torchloom.core.incidents.circuit_breaker import open_reason
from torchloom.core.incidents.responses import Trouble, respond
from torchloom.core.state.cluster import ClusterState
from torchloom.core.state.device_map import Device
from torchloom.core.state.rank_states import PRESENT
from torchloom.core.state.run_states import Run
from torchloom.core.torchft.members import evict
from torchloom.protocol import records
from torchloom.protocol.facts import ALL_OVER, DeviceFailed, DeviceRecovered, DeviceWarned
from torchloom.protocol.ids import ReplicaId
from torchloom.protocol.operator import Done, Fail, Recover, Register
from torchloom.protocol.phrase import Phrase, Prose, phrase
from torchloom.protocol.records import Record
from torchloom.protocol.views import Assignment

HAND = "hand"
"""The source of what operators report with `loom fail`."""
WARNING = "device_warning"


def handle_failed(cluster: ClusterState, fact: DeviceFailed, now: float) -> Decision:
    blame = records.Blame(by=fact.alert or fact.source, cause=fact.cause, began=fact.began, alert=bool(fact.alert))
    return _fail(cluster, fact.device, fact.source, blame, now)


def _fail(cluster: ClusterState, device: str, source: str, blame: records.Blame, now: float) -> Decision:
    existing, cause = _find_device(cluster, device, guess=blame.by == HAND), blame.cause
    replicas = cluster.drmap.replicas_on(device)
    on_it = phrase("replicas_on_it", replicas=replicas)
    earlier = next((other for other in existing.blames if other.by == blame.by and other.began == blame.began), None)
    if earlier is not None and earlier.overruled:
        return NOTHING
    blamed = records.DeviceBlamed(device=device, blame=blame, node=existing.node)
    if existing.failed:
        more = (blamed, *_evidence(existing, phrase("source_says", source=source, what=cause)))
        text = phrase("device_failed_before", device=device, cause=existing.cause, on_it=on_it)
        return Decision(more if earlier is None else (), answer=Done(text=text, replicas=replicas))
    marked = records.DeviceMarkedFailed(device=device, cause=cause, source=source, replicas=replicas)
    opened = records.IncidentOpened(
        id=provisional("device", device),
        what=phrase("device_failed", device=device, cause=cause),
        about=records.About(device=device),
        affected=replicas,
        evidence=(phrase("source_says", source=source, what=cause), *_describe_use(cluster, existing)),
        decision=phrase("device_report_only"),
        reason=phrase("device_in_use" if replicas else "device_not_in_use", device=device),
        kind="device",
    )
    answer = Done(text=phrase("device_fails", device=device, cause=cause, on_it=on_it), replicas=replicas)
    return Decision((blamed, marked, opened), answer=answer) + _respond(cluster, opened, now)


def withdraw(cluster: ClusterState, fact: DeviceRecovered) -> Decision:
    """A source withdraws its report that a device failed; other sources may still report it."""
    existing, by = _find_device(cluster, fact.device), fact.alert or fact.source
    mine = next((blame for blame in existing.blames if blame.by == by), None)
    if mine is not None and mine.began > fact.began > 0:
        return NOTHING
    cleared = () if mine is None else (records.DeviceCleared(device=existing.id, by=by),)
    others = [blame for blame in existing.blames if blame.by != by and not blame.overruled]
    if existing.failed and others:
        more = _evidence(existing, phrase("source_took_back", source=fact.source)) if mine else ()
        reason = phrase("device_still_failed", device=existing.id, cause=others[0].cause)
        return Decision((*cleared, *more), answer=Done(text=reason))
    recovered = recover(cluster, existing.id, fact.source)
    return replace(recovered, records=(*cleared, *recovered.records))


def recover(cluster: ClusterState, device: str, source: str) -> Decision:
    existing = _find_device(cluster, device, guess=True)
    if not existing.failed:
        return Decision(answer=Done(text=phrase("device_had_not_failed", device=device)))
    outcome = phrase("source_says_works", source=source)
    closed = (close_incident(existing.incident, outcome),) if existing.incident else ()
    recovered = records.DeviceMarkedRecovered(device=device, source=source)
    return Decision((*closed, recovered), answer=Done(text=phrase("device_works_again", device=device)))


def warn(cluster: ClusterState, fact: DeviceWarned, now: float) -> Decision:
    """A device has a problem but works: one incident for each condition, from its beginning to its end."""
    existing = _find_device(cluster, fact.device)
    about = records.About(device=fact.device, part=fact.what)
    open_ones = [i for i in cluster.incidents.open_of("") if i.kind == WARNING]
    if fact.over:
        all_over = fact.what == ALL_OVER
        mine = [i for i in open_ones if i.about == about or (all_over and i.about.device == fact.device)]
        outcome = fact.detail or phrase("device_agent_restarted" if all_over else "device_well_again")
        return Decision(tuple(close_incident(i.id, outcome) for i in mine))
    evidence = phrase("source_says", source=fact.source, what=fact.detail or fact.what)
    incident = next((i for i in open_ones if i.about == about), None)
    if incident is not None:
        more = () if evidence in incident.evidence else (records.IncidentAmended(id=incident.id, evidence=(evidence,)),)
        return Decision(more)
    opened = records.IncidentOpened(
        id=provisional("warning", fact.device, fact.what),
        what=phrase("device_not_well", device=fact.device, condition=fact.what, detail=fact.detail),
        about=about,
        affected=cluster.drmap.replicas_on(fact.device),
        evidence=(evidence, *_describe_use(cluster, existing)),
        decision=phrase("device_stays_in_use"),
        kind=WARNING,
    )
    return Decision((opened,)) + _respond(cluster, opened, now)


def register(cluster: ClusterState, ask: Register) -> Decision:
    replica = ReplicaId(ask.job, ask.replica)
    device = cluster.devices.get(ask.device)
    node = ask.node or (device.node if device else "")
    assignment = Assignment(device=ask.device, replica=replica, node=node)
    before = assignment in cluster.drmap
    text = phrase("device_registered", device=ask.device, replica=ask.replica, job=ask.job, before=before)
    record = records.DeviceRegistered(device=ask.device, replica=replica, node=node, operator=ask.operator)
    return Decision(() if before else (record,), answer=Done(text=text, replicas=(replica,)))


def _find_device(cluster: ClusterState, device: str, *, guess: bool = False) -> Device:
    """A device that a rank has used, or that an agent has listed."""
    if device in cluster.devices:
        return cluster.devices[device]
    nodes = cluster.runtime.nodes
    for node, seen in nodes.items():
        if device in seen.beat.devices:
            return Device(id=device, node=node)
    # Only people mistype names, and finding a close match among thousands of devices takes a while.
    names = [*cluster.devices, *(name for seen in nodes.values() for name in seen.beat.devices)] if guess else []
    hint = did_you_mean(device, names[:10_000], phrase("devices_listed"))
    raise Refused(phrase("device_unknown", device=device), hint)


def _describe_use(cluster: ClusterState, device: Device) -> tuple[Phrase, ...]:
    replicas = cluster.drmap.replicas_on(device.id)
    return phrase("replicas_on_it", replicas=replicas), phrase("device_node", node=device.node)


def _evidence(device: Device, text: Prose) -> tuple[Record, ...]:
    return (records.IncidentAmended(id=device.incident, evidence=(text,)),) if device.incident else ()


# ── responses ──


def _respond(cluster: ClusterState, opened: records.IncidentOpened, now: float) -> Decision:
    """What the policy of each job on a device responds to an incident about it."""
    device = opened.about.device
    responses: dict[str, Decision] = {}
    evictions: dict[ReplicaId, Decision] = {}
    for replica in cluster.drmap.replicas_on(device):
        run = cluster.runs.of(replica) or cluster.runs.active(replica.job)
        if run is not None and run.under_way and run.name not in responses:
            ranks = _ranks_on(cluster, run, device)
            trouble = Trouble(opened.kind, opened.id, opened.what, ranks, cluster.furthest(run))
            responses[run.name] = respond(cluster, run, trouble, now)
        elif run is None and opened.kind != WARNING:
            evictions[replica] = _out_of_quorum(cluster, replica, opened.what, now)
    parts: list[Phrase] = []
    decisions: list[Decision] = []
    for name, response in responses.items():
        # Without what was decided for this job alone: one decision for all jobs follows.
        mine = [
            r for r in response.records if isinstance(r, records.IncidentAmended) and r.id == opened.id and r.decision
        ]
        entries = (replace_fields(r, decision="") if r in mine else r for r in response.records)
        decisions.append(replace(response, records=tuple(entries)))
        parts += [phrase("decided_for", job=name, decision=r.decision) for r in mine[-1:]]
    for replica, eviction in evictions.items():
        decisions.append(eviction)
        if eviction:
            parts.append(phrase("decided_for", job=str(replica), decision=phrase("evicted_from_quorum")))
    if parts:
        decisions.append(Decision((records.IncidentAmended(id=opened.id, decision=phrase("together", parts=parts)),)))
    return merge_decisions(decisions)


def _out_of_quorum(cluster: ClusterState, replica: ReplicaId, reason: Prose, now: float) -> Decision:
    """Of a replica that torchLoom did not start: it can only make the rest of its job not wait for it."""
    if replica.job not in cluster.runtime.lighthouses or open_reason(cluster, now):
        return NOTHING
    ranks = cluster.ranks.of_replica(replica)
    return evict(cluster, replica.job, (rank.member for rank in ranks if rank.presence in PRESENT), reason)


def _ranks_on(cluster: ClusterState, run: Run, device: str) -> tuple[int, ...]:
    """The ranks of a run that use a device."""
    placed = {at.rank for at in run.places if at.device == device}
    reported = {rank.rank for rank in cluster.ranks_of(run) if device in cluster.ranks[rank].devices}
    return tuple(sorted(placed | reported))


HANDLERS: Handlers = {
    Fail: lambda cluster, ask, _reply, now: _fail(
        cluster, ask.device, ask.operator, records.Blame(by=HAND, cause=ask.cause), now
    ),
    Recover: lambda cluster, ask, _reply, _now: recover(cluster, ask.device, ask.operator),
    Register: lambda cluster, ask, _reply, _now: register(cluster, ask),
}
