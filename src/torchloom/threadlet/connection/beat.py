"""Assembles a beat: everything that a rank reports once a second."""

from __future__ import annotations

from torchloom.protocol.rank import Beat
from torchloom.threadlet.connection.rank_state import Membership, RankState
from torchloom.threadlet.metrics.liveness import count_collectives
from torchloom.threadlet.process.hardware import device_free_mb, device_mb, free_mb, rss_mb

READ_SECONDS = 0.2
"""Longest wait for a device to give up a number."""
_STEP = 10**6
"""Of a torchft replica, collectives are counted within a step; this is more than any step has."""


async def make_beat(state: RankState) -> Beat:
    """The steps since the last beat, and everything else as it is now."""
    meter, boundary = state.meter, state.boundary
    stretch = meter.take()
    await state.reader.refresh(meter.values.copy(), READ_SECONDS, tuple(meter.losses))
    readings = state.reader.readings
    member = state.member or Membership()
    collectives = count_collectives() if state.member is None else stretch.step * _STEP + member.begun
    return Beat(
        incarnation=state.incarnation,
        step=stretch.step,
        times=stretch.times,
        loss=readings.loss,
        samples_per_second=stretch.samples_per_second,
        metrics=readings.metrics,
        not_finite=tuple(sorted(readings.not_finite)),
        bad_steps=readings.bad_steps,
        rss_mb=rss_mb(),
        device_mb=device_mb(),
        free_mb=free_mb(),
        device_free_mb=device_free_mb(),
        dropped=meter.dropped + readings.dropped,
        change=boundary.participant.in_force,
        paused=boundary.participant.paused,
        knobs=boundary.values() if state.rank.rank == 0 else {},
        idle_seconds=meter.idle_seconds(),
        phase=state.liveness.phases.now,
        collectives=collectives,
        quorum=member.quorum,
        participants=member.participants,
        discarded=member.discarded,
    )
