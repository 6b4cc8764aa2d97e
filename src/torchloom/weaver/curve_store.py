"""The downsampled history of every rank: a point now and then, kept in memory and in a stream."""

from __future__ import annotations

import asyncio

from torchloom.core.state.curves import Curve
from torchloom.core.state.runtime import Watch
from torchloom.protocol.ids import RankId
from torchloom.protocol.views import CurvePoints, Point
from torchloom.settings import Settings
from torchloom.weaver.health import Clock, quietly
from torchloom.weaver.store import Store

RANKS = 1000
"""In one message of curve points."""


class CurveStore:
    def __init__(self, store: Store, watch: Watch, settings: Settings, clock: Clock) -> None:
        self._store = store
        self._watch = watch
        self._settings = settings
        self._clock = clock

    async def keep(self) -> None:
        await quietly(self._recall_curves)
        while True:
            await asyncio.sleep(self._settings.curve_seconds)
            await quietly(self._extend_curves)

    async def _recall_curves(self) -> None:
        async for chunk in self._store.read_curves():
            for rank, point in chunk.points:
                self._add_point(rank, point)

    async def _extend_curves(self) -> None:
        now = round(self._clock(), 3)
        ranks, chunks = tuple(self._watch.pulses), []
        for start in range(0, len(ranks), RANKS):
            chunks.append(tuple(filter(None, (self._extend(rank, now) for rank in ranks[start : start + RANKS]))))
            await asyncio.sleep(0)  # beats wait
        for chunk in filter(None, chunks):
            await self._store.write_curves(CurvePoints(points=chunk))

    def _extend(self, rank: RankId, now: float) -> tuple[RankId, Point] | None:
        """With the latest beat, if there was one since."""
        pulse = self._watch.pulses.get(rank)
        if pulse is None or pulse.beat is None or pulse.heard <= pulse.charted:
            return None
        pulse.charted = pulse.heard
        point = Point(now, pulse.beat.step, pulse.beat.loss, pulse.beat.samples_per_second)
        self._add_point(rank, point)
        return rank, point

    def _add_point(self, rank: RankId, point: Point) -> None:
        pulse = self._watch.pulses.get(rank)
        if pulse is not None:
            if pulse.curve is None:
                pulse.curve = Curve(self._settings.curve_points)
            pulse.curve.add(point)
