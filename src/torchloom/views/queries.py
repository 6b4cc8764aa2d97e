"""The fabric as a viewer sees it."""

from __future__ import annotations

from msgspec.structs import replace

from torchloom.core.jobs.placement import waits_for
from torchloom.core.state.change_ledger import ChangePhase
from torchloom.core.state.cluster import Fabric, Job, Rank
from torchloom.core.state.device import Device
from torchloom.core.state.incident import DECIDED, Incident
from torchloom.core.state.presence import JobPhase, Presence
from torchloom.core.state.runs import Run, RunPhase
from torchloom.core.state.runtime import NODE_SILENCE
from torchloom.protocol.knob_values import Value
from torchloom.protocol.node import Reading
from torchloom.protocol.phrase import phrase
from torchloom.protocol.queries import LookCheckpoints, LookCurves, LookFabric, LookKnobs, LookRuns
from torchloom.protocol.views import (
    ChangeView,
    CheckpointsView,
    CurvesView,
    DeviceView,
    FabricView,
    IncidentView,
    JobView,
    KnobsView,
    KnobView,
    NodeView,
    PlaneView,
    RankView,
    RunsView,
    RunView,
    SeatView,
)
from torchloom.views.wording.phrases import render, render_all, shorten

CLOSED_SHOWN = 50
"""Closed incidents in a picture; the log has all."""
INCIDENTS_SHOWN = 200
EVIDENCE_SHOWN = 200_000
"""Characters of what is told of them; beyond, the older ones are told in short."""
SHORT = 200
CHANGES_SHOWN = 100
UNUSED_SHOWN = 1000
"""Devices in a picture that no rank has."""
READINGS_SHOWN = 2000
"""Readings in a picture of all nodes; where there are more, none is: it has to fit one message."""


def picture(fabric: Fabric, plane: PlaneView, look: LookFabric) -> FabricView:
    """Ranks, their devices and seats in pages, since the whole is too large for a message; the rest on the first."""
    ranks = fabric.order() if look.job is None else sorted(fabric.ranks_of_job.get(look.job, ()))
    page = ranks[look.offset : look.offset + look.limit]
    idle: dict[str, Device] = {}
    seats = [seat for rank in page for seat in fabric.drmap.seats_of_rank(rank)]
    devices = {seat.device for seat in seats} | {device for rank in page for device in fabric.ranks[rank].devices}
    view = FabricView(
        plane=plane,
        ranks=tuple(_rank(fabric, fabric.ranks[rank]) for rank in page),
        total_ranks=len(ranks),
    )
    if look.offset == 0:
        by_hand = sorted(fabric.hand_seats, key=lambda seat: (seat.device, seat.replica))
        seats += by_hand[:UNUSED_SHOWN]
        idle = _idle(fabric)
        devices |= {seat.device for seat in by_hand[:UNUSED_SHOWN]} | _unused(fabric, idle)
        jobs = [job for name, job in sorted(fabric.jobs.items()) if look.job in {None, name}]
        view = replace(
            view,
            jobs=tuple(_job(fabric, job) for job in jobs),
            incidents=_incidents(fabric, look),
        )
    readings = _readings(fabric, plane.now) if look.readings else {}
    known = [device for name in sorted(devices) if (device := fabric.devices.get(name) or idle.get(name))]
    return replace(
        view,
        seats=tuple(SeatView(device=s.device, replica=s.replica, rank=s.rank, node=s.node) for s in seats),
        devices=tuple(_device(fabric, device, readings.get(device.id)) for device in known),
    )


def _readings(fabric: Fabric, now: float) -> dict[str, Reading]:
    """What devices say of themselves, as far as agents have told of late."""
    speaking = (seen.beat for seen in fabric.watch.nodes.values() if now - seen.heard < NODE_SILENCE)
    return {reading.device: reading for beat in speaking for reading in beat.readings}


def _idle(fabric: Fabric) -> dict[str, Device]:
    """Devices that are known only because an agent says that its node has them."""
    nodes = fabric.watch.nodes.items()
    listed = {device: node for node, seen in nodes for device in seen.beat.devices}
    return {device: Device(id=device, node=node) for device, node in listed.items() if device not in fabric.devices}


def _unused(fabric: Fabric, idle: dict[str, Device]) -> set[str]:
    """Devices that no rank we know of has: failed ones first, for they matter most."""
    used = {device for rank in fabric.ranks.values() for device in rank.devices}
    unused = [device for device in (*fabric.devices.values(), *idle.values()) if device.id not in used]
    return {device.id for device in sorted(unused, key=lambda d: (not d.failed, d.id))[:UNUSED_SHOWN]}


def _incidents(fabric: Fabric, look: LookFabric) -> tuple[IncidentView, ...]:
    """Newest first; of one job also those of no job. So many can be shown whole, the others in short."""
    if look.incident is not None:
        known = fabric.incidents.get(look.incident)
        return (_incident(known),) if known is not None else ()
    wanted = [i for i in fabric.incidents.values() if look.job is None or i.job in {"", look.job}]
    closed = [i for i in wanted if i.closed is not None][-CLOSED_SHOWN:]
    shown = [i for i in wanted if i.closed is None] + closed
    views = []
    room = EVIDENCE_SHOWN
    for incident in sorted(shown, key=lambda incident: -incident.opened)[:INCIDENTS_SHOWN]:
        view = _incident(incident)
        room -= sum(map(len, view.evidence)) + sum(len(text) for _, text in view.history)
        if room < 0:
            view = replace(view, evidence=tuple(text[:SHORT] for text in view.evidence[:3]), history=())
        views.append(view)
    return tuple(views)


def _incident(incident: Incident) -> IncidentView:
    decided = phrase(DECIDED, decision=incident.decision)
    return IncidentView(
        id=incident.id,
        opened=incident.opened,
        what=render(incident.what),
        about=incident.about,
        affected=incident.affected,
        culprits=incident.culprits,
        job=incident.job,
        evidence=render_all(incident.evidence),
        decision=render(incident.decision),
        short=render(shorten(incident.what)),
        brief=render(shorten(incident.decision)),
        decided=next((at for at, entry in incident.history if entry == decided), None),
        reason=render(incident.reason),
        outcome=render(incident.outcome),
        closed=incident.closed,
        kind=incident.kind,
        history=tuple((at, render(shorten(entry))) for at, entry in incident.history if entry != decided),
        stopped=incident.stopped[0] if incident.stopped is not None else "",
        lost_steps=incident.lost_steps,
        lost_seconds=incident.lost_seconds,
    )


def _device(fabric: Fabric, device: Device, reading: Reading | None) -> DeviceView:
    return DeviceView(
        device=device.id,
        node=device.node,
        health="failed" if device.failed else "ok",
        since=device.since,
        cause=render(device.cause),
        replicas=fabric.drmap.replicas_on(device.id),
        reading=reading,
    )


def _rank(fabric: Fabric, rank: Rank) -> RankView:
    pulse = fabric.watch.pulses.get(rank.id)
    heard = pulse.heard if pulse and pulse.beat else None
    return RankView(
        rank=rank.id,
        presence=rank.presence.value,
        since=rank.since,
        reason=render(rank.reason),
        incarnation=rank.incarnation,
        node=rank.node,
        pid=rank.pid,
        devices=rank.devices,
        world_size=rank.world_size,
        heard=heard,
        beat=pulse.beat if pulse else None,
        counted=rank.counted,
        member=rank.member,
        evicted=_is_evicted(fabric, rank),
        drained=(run := fabric.runs.of(rank.id.of)) is not None and run.drained,
    )


def _is_evicted(fabric: Fabric, rank: Rank) -> bool:
    return bool(rank.member) and rank.member in fabric.evicted.get(rank.id.job, ())


def _job(fabric: Fabric, job: Job) -> JobView:
    members = [fabric.ranks[rank] for rank in fabric.ranks_of_job.get(job.name, ())]
    live = [rank for rank in members if rank.presence is Presence.LIVE and not _is_evicted(fabric, rank)]
    told = live if job.phase is JobPhase.RUNNING and live else members
    beats = [p.beat for rank in told if (p := fabric.watch.pulses.get(rank.id)) and p.beat is not None]
    losses = [beat.loss for beat in beats if beat.loss is not None]
    rates = [beat.samples_per_second for beat in beats if beat.samples_per_second is not None]
    runs = [run for run in fabric.runs.of_job(job.name) if not run.serves]
    none_runs = bool(runs) and all(run.phase is not RunPhase.RUNNING for run in runs)
    phase = runs[0].phase if none_runs else job.phase
    return JobView(
        job=job.name,
        phase=phase.value,
        began=job.began,
        ended=job.ended,
        reason=render(job.reason),
        ranks=sum(run.world_size for run in runs) or len(members),
        live=len(live),
        step=min((beat.step for beat in beats), default=None),
        loss=sum(losses) / len(losses) if losses else None,
        samples_per_second=sum(rates) if rates and job.phase is JobPhase.RUNNING else None,
        paused=bool(live) and any(beat.paused for beat in beats),
    )


def knobs(fabric: Fabric, look: LookKnobs) -> KnobsView:
    now_there: dict[str, Value] = {}
    by_replica: dict[str, dict[str, Value]] = {}
    newest = 0
    for rank in sorted(fabric.ranks_of_job.get(look.job, ()), reverse=True):
        pulse = fabric.watch.pulses.get(rank)
        if pulse is not None and pulse.beat is not None and pulse.beat.knobs and not pulse.over:
            now_there, newest = {**now_there, **pulse.beat.knobs}, pulse.beat.change
            by_replica[rank.replica] = pulse.beat.knobs
    shown = []
    for name, knob in fabric.ledger.knobs.get(look.job, {}).items():
        change = fabric.ledger.changes.get(knob.change)
        applied = change is not None and change.phase is ChangePhase.SETTLED
        newer = applied and change is not None and change.change.number > newest  # than the last beat
        if change is not None and not (change.replica is None and change.rank is None):
            newer = False  # it is not the value of the job
        value = knob.value if newer else now_there.get(name, knob.value)
        told = {} if newer or knob.spec.per == "rank" else by_replica
        shown.append(
            KnobView(
                spec=knob.spec,
                value=value,
                elsewhere={r: values[name] for r, values in sorted(told.items()) if values.get(name, value) != value},
                changed_by=change.operator if change else "",
                changed=change.asked if change else None,
                change=knob.change,
            )
        )
    return KnobsView(
        knobs=tuple(shown),
        changes=tuple(
            ChangeView(
                id=change.id,
                job=change.job,
                action=change.change.action,
                values=change.change.values,
                before=change.before,
                step=change.change.step,
                over=change.change.over,
                phase=change.phase.value,
                outcome=render(change.outcome),
                operator=change.operator,
                asked=change.asked,
                target=change.target,
                reverted_by=change.reverted_by,
                ranks=len(change.lives),
            )
            for change in list(fabric.ledger.of_job(look.job))[: -CHANGES_SHOWN - 1 : -1]
        ),
    )


def checkpoints(fabric: Fabric, look: LookCheckpoints) -> CheckpointsView:
    kept = fabric.keeping.of(look.job)
    return CheckpointsView(
        job=kept.job,
        folder=kept.folder,
        node=kept.node,
        saved=kept.saved,
        failures=kept.failures,
        failed=kept.failed,
        resumed=kept.resumed,
    )


def curves(fabric: Fabric, look: LookCurves) -> CurvesView:
    ranks = sorted(r for r in fabric.ranks_of_job.get(look.job, ()) if look.replica in {None, r.replica})
    page = ranks[look.offset : look.offset + look.limit]
    drawn = []
    for rank in page:
        pulse = fabric.watch.pulses.get(rank)
        drawn.append((rank, pulse.curve.points if pulse and pulse.curve else ()))
    return CurvesView(curves=tuple(drawn), total=len(ranks))


_WAITING = {RunPhase.SUBMITTED, RunPhase.RESTARTING}


def runs(fabric: Fabric, look: LookRuns, now: float) -> RunsView:
    known = fabric.runs
    wanted = known.named(look.job) if look.job is not None else [known.by_job[job] for job in sorted(known.by_job)]
    there = [run for run in fabric.runs.by_job.values() if not run.over and run.phase not in _WAITING]
    places = [place for run in there for place in run.places]
    many = sum(len(seen.beat.readings) for seen in fabric.watch.nodes.values()) > READINGS_SHOWN
    return RunsView(
        runs=tuple(
            RunView(
                job=run.job,
                phase=run.phase.value,
                since=run.since,
                submitted=run.submitted,
                task=run.task,
                operator=run.operator,
                attempt=run.ordinal,
                places=run.places,
                resume=run.resume,
                resume_step=run.resume_step,
                reason=render(run.reason),
                step=max(run.step, fabric.furthest(run)),
                waiting=render(waits_for(fabric, run, now)) if run.phase in _WAITING else "",
                notes=tuple(replace(note, reason=render(note.reason)) for note in run.notes),
                goodput=fabric.goodput.of(run.job, now, _step(fabric, run)),
            )
            for run in wanted
        ),
        nodes=tuple(
            NodeView(
                node=node,
                beat=replace(seen.beat, readings=()) if many else seen.beat,
                heard=seen.heard,
                drained=node in fabric.runs.drained,
                used=sum(1 for place in places if place.node == node),
            )
            for node, seen in sorted(fabric.watch.nodes.items())
        ),
    )


def _step(fabric: Fabric, run: Run) -> int | None:
    """How far the attempt under way is, if one of its ranks has said so since this weaver began."""
    pulses = [fabric.watch.pulses.get(run.rank(place.rank)) for place in run.places]
    return fabric.furthest(run) if any(pulse is not None and pulse.beat is not None for pulse in pulses) else None
