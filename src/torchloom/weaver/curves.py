"""The downsampled history of every rank: a point now and then, kept in memory and in a stream."""

from __future__ import annotations

import asyncio

from torchloom.core.curves import Curve
from torchloom.core.watch import Watch
from torchloom.messages import CurvePoints, Point, RankId
from torchloom.settings import Settings
from torchloom.weaver.health import Clock, quietly
from torchloom.weaver.store import Store

RANKS = 1000
"""In one message of curve points."""


class CurveKeeper:
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
        now = self._clock()
        points = []
        for rank, pulse in self._watch.pulses.items():
            if pulse.beat is not None and pulse.heard > pulse.charted:
                pulse.charted = pulse.heard
                point = Point(round(now, 3), pulse.beat.step, pulse.beat.loss, pulse.beat.samples_per_second)
                points.append((rank, point))
        for rank, point in points:
            self._add_point(rank, point)
        for start in range(0, len(points), RANKS):
            await self._store.write_curves(CurvePoints(points=tuple(points[start : start + RANKS])))

    def _add_point(self, rank: RankId, point: Point) -> None:
        pulse = self._watch.pulses.get(rank)
        if pulse is not None:
            if pulse.curve is None:
                pulse.curve = Curve(self._settings.curve_points)
            pulse.curve.add(point)
