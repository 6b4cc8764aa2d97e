"""Reports that a device has failed or works again, and devices that operators register.

Several sources may report a device failed: alerts, an agent, an operator. Each can withdraw only its own report; the
device works again when none is left. An operator overrules all of them: an overruled alert may still be repeated by its
source, and is ignored until it fires again.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection

from torchloom.core.decision import Decision, Handlers
from torchloom.core.incident_ids import close_incident, provisional
from torchloom.core.state.cluster import ClusterState
from torchloom.core.state.device import Blame, Device
from torchloom.protocol.facts import ALL_OVER, DeviceRecovered, DeviceWarned
from torchloom.protocol.ids import ReplicaId
from torchloom.protocol.incident_records import About, IncidentAmended, IncidentOpened
from torchloom.protocol.operator import Done, No, Recover, Register
from torchloom.protocol.phrase import Phrase, Prose, phrase
from torchloom.protocol.records import (
    DeviceBlamed,
    DeviceCleared,
    DeviceMarkedFailed,
    DeviceMarkedRecovered,
    DeviceRegistered,
    Record,
)
from torchloom.protocol.views import Assignment

HAND = "hand"
"""The source of what operators report with `loom fail`."""
WARNING = "device_warning"


def fail(cluster: ClusterState, device: str, source: str, blame: Blame) -> Decision:
    known, cause = find_device(cluster, device), blame.cause
    if known is None:
        return _unknown(cluster, device, guess=blame.by == HAND)
    replicas = cluster.drmap.replicas_on(device)
    on_it = _on_it(replicas)
    said = next((other for other in known.blames if other.by == blame.by and other.began == blame.began), None)
    if said is not None and said.overruled:
        return Decision()
    blamed = DeviceBlamed(
        device=device, by=blame.by, cause=cause, began=blame.began, alert=blame.alert, node=known.node
    )
    if known.failed:
        more = (blamed, *_evidence(known, _says(source, cause)))
        return Decision(
            more if said is None else (),
            answer=Done(
                text=phrase("device_failed_before", device=device, cause=known.cause, on_it=on_it), replicas=replicas
            ),
        )
    records: tuple[Record, ...] = (
        blamed,
        DeviceMarkedFailed(device=device, cause=cause, source=source, replicas=replicas),
        IncidentOpened(
            id=provisional("device", device),
            what=phrase("device_failed", device=device, cause=cause),
            about=About(device=device),
            affected=replicas,
            evidence=(_says(source, cause), on_it, _at(known)),
            decision=phrase("device_report_only"),
            reason=phrase("device_in_use" if replicas else "device_not_in_use", device=device),
            kind="device",
        ),
    )
    return Decision(
        records,
        answer=Done(text=phrase("device_fails", device=device, cause=cause, on_it=on_it), replicas=replicas),
    )


def withdraw(cluster: ClusterState, fact: DeviceRecovered) -> Decision:
    """A source withdraws its report that a device failed; other sources may still report it."""
    known, by = find_device(cluster, fact.device), fact.alert or fact.source
    if known is None:
        return _unknown(cluster, fact.device)
    mine = next((blame for blame in known.blames if blame.by == by), None)
    if mine is not None and mine.began > fact.began > 0:
        return Decision()
    cleared = () if mine is None else (DeviceCleared(device=known.id, by=by),)
    others = [blame for blame in known.blames if blame.by != by and not blame.overruled]
    if known.failed and others:
        more = _evidence(known, phrase("source_took_back", source=_who(fact.source))) if mine else ()
        reason = phrase("device_still_failed", device=known.id, cause=others[0].cause)
        return Decision((*cleared, *more), answer=Done(text=reason))
    decided = recover(cluster, known.id, fact.source)
    return Decision((*cleared, *decided.records), answer=decided.answer)


def recover(cluster: ClusterState, device: str, source: str) -> Decision:
    known = find_device(cluster, device)
    if known is None:
        return _unknown(cluster, device, guess=True)
    if not known.failed:
        return Decision(answer=Done(text=phrase("device_had_not_failed", device=device)))
    records: list[Record] = []
    if known.incident:
        outcome = phrase("source_says_works", source=_who(source))
        records.append(close_incident(known.incident, outcome))
    records.append(DeviceMarkedRecovered(device=device, source=source))
    return Decision(tuple(records), answer=Done(text=phrase("device_works_again", device=device)))


def warn(cluster: ClusterState, fact: DeviceWarned) -> Decision:
    """A device has a problem but works: one incident for each condition, from its beginning to its end."""
    known = find_device(cluster, fact.device)
    if known is None:
        return _unknown(cluster, fact.device)
    about = About(device=fact.device, part=fact.what)
    open_ones = [i for i in cluster.incidents.open_of("") if i.kind == WARNING]
    if fact.over:
        if fact.what == ALL_OVER:
            mine = [i for i in open_ones if i.about.device == fact.device]
        else:
            mine = [i for i in open_ones if i.about == about]
        outcome = fact.detail or phrase("device_agent_restarted" if fact.what == ALL_OVER else "device_well_again")
        records = tuple(close_incident(i.id, outcome) for i in mine)
        return Decision(records)
    evidence = _says(fact.source, fact.detail or fact.what)
    told = next((i for i in open_ones if i.about == about), None)
    if told is not None:
        more = () if evidence in told.evidence else (IncidentAmended(id=told.id, evidence=(evidence,)),)
        return Decision(more)
    replicas = cluster.drmap.replicas_on(fact.device)
    opened = IncidentOpened(
        id=provisional("warning", fact.device, fact.what),
        what=phrase("device_not_well", device=fact.device, condition=fact.what, detail=fact.detail),
        about=about,
        affected=replicas,
        evidence=(evidence, _on_it(replicas), _at(known)),
        decision=phrase("device_stays_in_use"),
        kind=WARNING,
    )
    return Decision((opened,))


def register(cluster: ClusterState, ask: Register) -> Decision:
    replica = ReplicaId(ask.job, ask.replica)
    device = cluster.devices.get(ask.device)
    node = ask.node or (device.node if device else "")
    assignment = Assignment(device=ask.device, replica=replica, node=node)
    before = assignment in cluster.drmap
    text = phrase(
        "device_registered_before" if before else "device_registered",
        device=ask.device,
        replica=ask.replica,
        job=ask.job,
    )
    if before:
        return Decision(answer=Done(text=text, replicas=(replica,)))
    record = DeviceRegistered(device=ask.device, replica=replica, node=node, operator=ask.operator)
    return Decision((record,), answer=Done(text=text, replicas=(replica,)))


def find_device(cluster: ClusterState, device: str) -> Device | None:
    """A device that a rank has used, or that an agent has listed."""
    known = cluster.devices.get(device)
    if known is None:
        nodes = cluster.runtime.nodes.items()
        there = (Device(id=device, node=node) for node, seen in nodes if device in seen.beat.devices)
        known = next(there, None)
    return known


def _who(source: str) -> Prose:
    return source or phrase("someone")


def _says(source: str, what: Prose) -> Phrase:
    return phrase("source_says", source=_who(source), what=what)


def _on_it(replicas: Collection[ReplicaId]) -> Phrase:
    return phrase("replicas_on_it" if replicas else "no_replica_on_it", replicas=replicas)


def _at(device: Device) -> Phrase:
    return phrase("device_node" if device.node else "device_node_unknown", node=device.node)


def _evidence(device: Device, text: Prose) -> tuple[Record, ...]:
    return (IncidentAmended(id=device.incident, evidence=(text,)),) if device.incident else ()


def _unknown(cluster: ClusterState, device: str, *, guess: bool = False) -> Decision:
    """Only people mistype names, and finding a close match among thousands of devices takes a while."""
    known = [name for seen in cluster.runtime.nodes.values() for name in seen.beat.devices] if guess else []
    near = difflib.get_close_matches(device, [*cluster.devices, *known][:10_000], n=1) if guess else []
    hint = phrase("did_you_mean", name=near[0]) if near else phrase("devices_listed")
    answer = No(why=phrase("device_unknown", device=device), hint=hint)
    return Decision(answer=answer)


HANDLERS: Handlers = {
    Recover: lambda cluster, ask, _reply, _now: recover(cluster, ask.device, ask.operator),
    Register: lambda cluster, ask, _reply, _now: register(cluster, ask),
}
