"""Devices: someone says that one failed or works again, or registers one by hand.

Several may say that a device is broken, each for a reason of his own: alerts, an agent, a person. Each can take back
only what he said himself, and the device works again when nobody is left. A person overrules them all; an alert that he
overruled goes on being told and is not listened to until it begins anew.
"""

from __future__ import annotations

import difflib

from torchloom.core.decision import Decision
from torchloom.core.device import Blame, Device
from torchloom.core.drmap import Seat
from torchloom.core.fabric import Fabric
from torchloom.messages import (
    ALL_OVER,
    ON_IT,
    DeviceBlamed,
    DeviceCleared,
    DeviceMarkedFailed,
    DeviceMarkedRecovered,
    DeviceRecovered,
    DeviceSeated,
    DeviceWarned,
    Done,
    IncidentAmended,
    IncidentOpened,
    No,
    Record,
    Register,
    ReplicaId,
)

HAND = "hand"
"""A person says so, with `loom fail`."""
WARNING = "device_warning"


def fail(fabric: Fabric, device: str, source: str, blame: Blame) -> Decision:
    known, cause = find(fabric, device), blame.cause
    if known is None:
        return _unknown(fabric, device, guess=blame.by == HAND)
    replicas = fabric.drmap.replicas_on(device)
    on_it = ", ".join(map(str, replicas)) or "no replica"
    said = next((other for other in known.blames if other.by == blame.by and other.began == blame.began), None)
    if said is not None and said.overruled:
        return Decision(reason=f"{device}: {cause}, but a person has said since that it works")
    blamed = DeviceBlamed(
        device=device, by=blame.by, cause=cause, began=blame.began, alert=blame.alert, node=known.node
    )
    if known.failed:
        more = (blamed, *_evidence(known, f"{source or 'someone'} says: {cause}"))
        return Decision(
            more if said is None else (),
            answer=Done(text=f"{device} had failed already ({known.cause}); on it: {on_it}", replicas=replicas),
            reason=f"{device} had failed already",
        )
    records: tuple[Record, ...] = (
        blamed,
        DeviceMarkedFailed(device=device, cause=cause, source=source, replicas=replicas),
        IncidentOpened(
            id=fabric.incidents.next_id(),
            what=f"device {device} failed: {cause}",
            subject=device,
            evidence=(f"{source or 'someone'} says: {cause}", f"{ON_IT}{on_it}", f"node {known.node or 'unknown'}"),
            decision="reported; no policy acts on it",
            reason=f"the replicas on {device} are affected" if replicas else f"nothing runs on {device}",
            kind="device",
        ),
    )
    return Decision(
        records,
        answer=Done(text=f"{device} failed ({cause}); on it: {on_it}", replicas=replicas),
        reason=f"{device}: {cause}",
    )


def take_back(fabric: Fabric, fact: DeviceRecovered) -> Decision:
    """Whoever said that a device failed does not say so any more; others may."""
    known, by = find(fabric, fact.device), fact.alert or fact.source
    if known is None:
        return _unknown(fabric, fact.device)
    mine = next((blame for blame in known.blames if blame.by == by), None)
    if mine is not None and mine.began > fact.began > 0:
        return Decision(reason=f"{by} has begun again since")
    cleared = () if mine is None else (DeviceCleared(device=known.id, by=by),)
    others = [blame for blame in known.blames if blame.by != by and not blame.overruled]
    if known.failed and others:
        more = _evidence(known, f"{fact.source or 'someone'} does not say so any more") if mine else ()
        reason = f"{known.id} is still said to have failed: {others[0].cause}"
        return Decision((*cleared, *more), answer=Done(text=reason), reason=reason)
    decided = recover(fabric, known.id, fact.source)
    return Decision((*cleared, *decided.records), answer=decided.answer, reason=decided.reason)


def recover(fabric: Fabric, device: str, source: str) -> Decision:
    known = find(fabric, device)
    if known is None:
        return _unknown(fabric, device, guess=True)
    if not known.failed:
        return Decision(answer=Done(text=f"{device} had not failed"), reason=f"{device} had not failed")
    records: list[Record] = []
    if known.incident:
        outcome = f"{source or 'someone'} says that it works again"
        records.append(IncidentAmended(id=known.incident, outcome=outcome, closed=True))
    records.append(DeviceMarkedRecovered(device=device, source=source))
    return Decision(tuple(records), answer=Done(text=f"{device} works again"), reason=f"{device} recovered")


def warn(fabric: Fabric, fact: DeviceWarned) -> Decision:
    """A device is not well: one incident for each condition, from its beginning to its end."""
    known = find(fabric, fact.device)
    if known is None:
        return _unknown(fabric, fact.device)
    subject = f"{fact.device}#{fact.what}"
    open_ones = [i for i in fabric.incidents.open_of("") if i.kind == WARNING]
    if fact.over:
        if fact.what == ALL_OVER:
            mine = [i for i in open_ones if i.subject.startswith(f"{fact.device}#")]
        else:
            mine = [i for i in open_ones if i.subject == subject]
        outcome = fact.detail or ("its agent began anew" if fact.what == ALL_OVER else "it is well again")
        records = tuple(IncidentAmended(id=i.id, outcome=outcome, closed=True) for i in mine)
        return Decision(records, reason=f"{fact.device}: no longer {fact.what}")
    evidence = f"{fact.source or 'someone'} says: {fact.detail or fact.what}"
    told = next((i for i in open_ones if i.subject == subject), None)
    if told is not None:
        more = () if evidence in told.evidence else (IncidentAmended(id=told.id, evidence=(evidence,)),)
        return Decision(more, reason=f"{fact.device} is {fact.what}, as before")
    replicas = fabric.drmap.replicas_on(fact.device)
    detail = f": {fact.detail}" if fact.detail else ""
    on_it = ", ".join(map(str, replicas)) or "no replica"
    opened = IncidentOpened(
        id=fabric.incidents.next_id(),
        what=f"device {fact.device} is not well ({fact.what}){detail}",
        subject=subject,
        evidence=(evidence, f"{ON_IT}{on_it}", f"node {known.node or 'unknown'}"),
        decision="reported; it stays in use",
        kind=WARNING,
    )
    return Decision((opened,), reason=f"{fact.device} is not well: {fact.what}{detail}")


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


def find(fabric: Fabric, device: str) -> Device | None:
    """A device that a rank has had, or that an agent says its node has."""
    known = fabric.devices.get(device)
    if known is None:
        nodes = fabric.watch.nodes.items()
        there = (Device(id=device, node=node) for node, seen in nodes if device in seen.beat.devices)
        known = next(there, None)
    return known


def _evidence(device: Device, text: str) -> tuple[Record, ...]:
    return (IncidentAmended(id=device.incident, evidence=(text,)),) if device.incident else ()


def _unknown(fabric: Fabric, device: str, *, guess: bool = False) -> Decision:
    """Only a person mistypes, and to guess what he meant takes a while among thousands."""
    known = [name for seen in fabric.watch.nodes.values() for name in seen.beat.devices] if guess else []
    near = difflib.get_close_matches(device, [*fabric.devices, *known][:10_000], n=1) if guess else []
    hint = f"did you mean {near[0]}?" if near else "`loom devices` lists the known ones"
    answer = No(why=f"device {device} is unknown; nothing was changed", hint=hint)
    return Decision(answer=answer, reason="unknown device")
