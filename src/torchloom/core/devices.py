"""Devices: someone says that one failed or works again, or registers one by hand."""

from __future__ import annotations

import difflib

from torchloom.core.decision import Decision
from torchloom.core.drmap import Seat
from torchloom.core.fabric import Fabric
from torchloom.messages import (
    DeviceMarkedFailed,
    DeviceMarkedRecovered,
    DeviceSeated,
    Done,
    IncidentAmended,
    IncidentOpened,
    No,
    Record,
    Register,
    ReplicaId,
)


def fail(fabric: Fabric, device: str, cause: str, source: str) -> Decision:
    known = fabric.devices.get(device)
    if known is None:
        return _unknown(fabric, device)
    replicas = fabric.drmap.replicas_on(device)
    on_it = ", ".join(map(str, replicas)) or "no replica"
    if known.failed:
        return Decision(
            answer=Done(text=f"{device} had failed already ({known.cause}); on it: {on_it}", replicas=replicas),
            reason=f"{device} had failed already",
        )
    records: tuple[Record, ...] = (
        DeviceMarkedFailed(device=device, cause=cause, source=source, replicas=replicas),
        IncidentOpened(
            id=fabric.next_incident(),
            what=f"device {device} failed: {cause}",
            subject=device,
            evidence=(f"{source or 'someone'} says: {cause}", f"on it: {on_it}", f"node {known.node or 'unknown'}"),
            decision="reported; no policy acts on it",
            reason=f"the replicas on {device} are affected" if replicas else f"nothing runs on {device}",
        ),
    )
    return Decision(
        records,
        answer=Done(text=f"{device} failed ({cause}); on it: {on_it}", replicas=replicas),
        reason=f"{device}: {cause}",
    )


def recover(fabric: Fabric, device: str, source: str) -> Decision:
    known = fabric.devices.get(device)
    if known is None:
        return _unknown(fabric, device)
    if not known.failed:
        return Decision(answer=Done(text=f"{device} had not failed"), reason=f"{device} had not failed")
    records: list[Record] = []
    if known.incident:
        outcome = f"{source or 'someone'} says that it works again"
        records.append(IncidentAmended(id=known.incident, outcome=outcome, closed=True))
    records.append(DeviceMarkedRecovered(device=device, source=source))
    return Decision(tuple(records), answer=Done(text=f"{device} works again"), reason=f"{device} recovered")


def register(fabric: Fabric, ask: Register) -> Decision:
    replica = ReplicaId(ask.job, ask.replica)
    device = fabric.devices.get(ask.device)
    node = ask.node or (device.node if device else "")
    seat = Seat(ask.device, replica, None, node)
    text = f"Registered device: {ask.device} for replica_id: {ask.replica} (job {ask.job})"
    if seat in fabric.drmap:
        return Decision(answer=Done(text=f"{text}, as before", replicas=(replica,)), reason="registered before")
    record = DeviceSeated(device=ask.device, replica=replica, node=node, operator=ask.operator)
    return Decision((record,), answer=Done(text=text, replicas=(replica,)), reason=text)


def _unknown(fabric: Fabric, device: str) -> Decision:
    near = difflib.get_close_matches(device, list(fabric.devices)[:10_000], n=1)
    hint = f"did you mean {near[0]}?" if near else "`loom devices` lists the known ones"
    answer = No(why=f"device {device} is unknown; nothing was changed", hint=hint)
    return Decision(answer=answer, reason="unknown device")
