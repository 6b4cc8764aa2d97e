"""The fabric as a viewer sees it."""

from __future__ import annotations

from torchloom.core.fabric import Fabric, Job, Rank
from torchloom.core.presence import JobPhase, Presence
from torchloom.messages import (
    ChangeView,
    CurvesView,
    DeviceView,
    FabricView,
    IncidentView,
    JobView,
    KnobsView,
    KnobView,
    LookCurves,
    LookFabric,
    LookKnobs,
    PlaneView,
    RankView,
    SeatView,
    Value,
)

CLOSED_SHOWN = 50
"""Closed incidents in a picture; the log has all."""


def picture(fabric: Fabric, plane: PlaneView, look: LookFabric) -> FabricView:
    """Everything but the ranks in full; of the ranks one page, the whole picture being too large for a message."""
    ranks = sorted(rank for rank in fabric.ranks if look.job is None or rank.job == look.job)
    page = ranks[look.offset : look.offset + look.limit]
    shown = {rank.of for rank in page}
    first = look.offset == 0
    # Seats follow the ranks of the page; those registered by hand and the rest of the fabric stand on the first.
    seats = [seat for replica in sorted(shown) for seat in fabric.drmap.seats_of(replica) if seat.rank is not None]
    seats += sorted(fabric.hand_seats, key=lambda s: (s.device, s.replica)) if first else []
    closed = [i for i in fabric.incidents.values() if i.closed is not None][-CLOSED_SHOWN:]
    incidents = [i for i in fabric.incidents.values() if i.closed is None] + closed
    incidents = [i for i in incidents if look.job is None or i.job in {"", look.job}]
    jobs = [job for name, job in sorted(fabric.jobs.items()) if look.job is None or name == look.job]
    return FabricView(
        plane=plane,
        jobs=tuple(_job(fabric, job) for job in jobs) if first else (),
        ranks=tuple(_rank(fabric, fabric.ranks[rank]) for rank in page),
        total_ranks=len(ranks),
        devices=tuple(
            DeviceView(
                device=device.id,
                node=device.node,
                health="failed" if device.failed else "ok",
                since=device.since,
                cause=device.cause,
                replicas=fabric.drmap.replicas_on(device.id),
            )
            for _, device in sorted(fabric.devices.items())
        )
        if first
        else (),
        seats=tuple(SeatView(device=s.device, replica=s.replica, rank=s.rank, node=s.node) for s in seats),
        incidents=tuple(
            IncidentView(
                id=i.id,
                opened=i.opened,
                what=i.what,
                subject=i.subject,
                job=i.job,
                evidence=i.evidence,
                decision=i.decision,
                reason=i.reason,
                outcome=i.outcome,
                closed=i.closed,
            )
            for i in sorted(incidents, key=lambda i: -i.opened)[:200]
        )
        if first
        else (),
    )


def _rank(fabric: Fabric, rank: Rank) -> RankView:
    pulse = fabric.watch.pulses.get(rank.id)
    heard = pulse.heard if pulse and pulse.beat else None
    return RankView(
        rank=rank.id,
        presence=rank.presence.value,
        since=rank.since,
        reason=rank.reason,
        incarnation=rank.incarnation,
        node=rank.node,
        pid=rank.pid,
        devices=rank.devices,
        world_size=rank.world_size,
        heard=heard,
        beat=pulse.beat if pulse else None,
    )


def _job(fabric: Fabric, job: Job) -> JobView:
    members = [fabric.ranks[rank] for rank in fabric.ranks_of_job.get(job.name, ())]
    live = [rank for rank in members if rank.presence is Presence.LIVE]
    told = live if job.phase is JobPhase.RUNNING and live else members
    beats = [p.beat for rank in told if (p := fabric.watch.pulses.get(rank.id)) and p.beat is not None]
    losses = [beat.loss for beat in beats if beat.loss is not None]
    rates = [beat.samples_per_second for beat in beats if beat.samples_per_second is not None]
    return JobView(
        job=job.name,
        phase=job.phase.value,
        began=job.began,
        ended=job.ended,
        reason=job.reason,
        ranks=len(members),
        live=len(live),
        step=min((beat.step for beat in beats), default=None),
        loss=sum(losses) / len(losses) if losses else None,
        samples_per_second=sum(rates) if rates and job.phase is JobPhase.RUNNING else None,
        paused=bool(live) and any(beat.paused for beat in beats),
    )


def knobs(fabric: Fabric, look: LookKnobs) -> KnobsView:
    now_there: dict[str, Value] = {}
    for rank in sorted(fabric.ranks_of_job.get(look.job, ()), reverse=True):
        pulse = fabric.watch.pulses.get(rank)
        if pulse is not None and pulse.beat is not None and not pulse.over:
            now_there |= pulse.beat.knobs
    changes = fabric.ledger.changes
    shown = []
    for name, knob in fabric.ledger.knobs.get(look.job, {}).items():
        change = changes.get(knob.change)
        shown.append(
            KnobView(
                spec=knob.spec,
                value=now_there.get(name, knob.value),
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
                outcome=change.outcome,
                operator=change.operator,
                asked=change.asked,
                target=change.target,
                reverted_by=change.reverted_by,
                ranks=len(change.lives),
            )
            for change in reversed(list(fabric.ledger.of_job(look.job)))
        ),
    )


def curves(fabric: Fabric, look: LookCurves) -> CurvesView:
    ranks = sorted(r for r in fabric.ranks_of_job.get(look.job, ()) if look.replica in {None, r.replica})
    page = ranks[look.offset : look.offset + look.limit]
    drawn = []
    for rank in page:
        pulse = fabric.watch.pulses.get(rank)
        drawn.append((rank, pulse.curve.points if pulse and pulse.curve else ()))
    return CurvesView(curves=tuple(drawn), total=len(ranks))
