"""The downsampled history of every rank, in memory and in a stream."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from torchloom.core.state.runtime import Curve, RuntimeState
from torchloom.protocol.ids import RankId
from torchloom.protocol.views import CurvePoints, Point
from torchloom.settings import Settings
from torchloom.weaver.health import Clock, quietly
from torchloom.weaver.log_store import Store

RANKS = 1000
"""Most ranks in one message of curve points."""


@dataclass(eq=False)
class CurveStore:
    store: Store
    runtime: RuntimeState
    settings: Settings
    clock: Clock

    async def keep(self) -> None:
        await quietly(self._recall_curves)
        while True:
            await asyncio.sleep(self.settings.curve_seconds)
            await quietly(self._extend_curves)

    async def _recall_curves(self) -> None:
        async for chunk in self.store.read_curves():
            for rank, point in chunk.points:
                self._add_point(rank, point)

    async def _extend_curves(self) -> None:
        now = round(self.clock(), 3)
        ranks, chunks = tuple(self.runtime.ranks), []
        for start in range(0, len(ranks), RANKS):
            chunks.append(tuple(filter(None, (self._extend(rank, now) for rank in ranks[start : start + RANKS]))))
            await asyncio.sleep(0)  # beats wait
        for chunk in filter(None, chunks):
            await self.store.write_curves(CurvePoints(points=chunk))

    def _extend(self, rank: RankId, now: float) -> tuple[RankId, Point] | None:
        """Add a point for the latest beat, if there was one since the last point."""
        rank_runtime = self.runtime.ranks.get(rank)
        if rank_runtime is None or rank_runtime.beat is None or rank_runtime.heard <= rank_runtime.charted:
            return None
        rank_runtime.charted = rank_runtime.heard
        point = Point(now, rank_runtime.beat.step, rank_runtime.beat.loss, rank_runtime.beat.samples_per_second)
        self._add_point(rank, point)
        return rank, point

    def _add_point(self, rank: RankId, point: Point) -> None:
        rank_runtime = self.runtime.ranks.get(rank)
        if rank_runtime is not None:
            if rank_runtime.curve is None:
                rank_runtime.curve = Curve(self.settings.curve_points)
            rank_runtime.curve.add(point)
