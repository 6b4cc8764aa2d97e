"""The nodes that jobs can be started on, as a table."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from torchloom.protocol.node import NodeBeat, RankStatus
from torchloom.protocol.views import NodeView
from torchloom.views.format.numbers import ABSENT
from torchloom.views.format.tables import Cell, Column, Row, Screen, table
from torchloom.views.format.times import ago
from torchloom.views.wording.phrases import render, render_all

SILENT_SECONDS = 6.0
"""After which an agent that beats every second is missed."""


def readable(beat: NodeBeat) -> NodeBeat:
    """The beat of an agent as people read it, with sentences instead of phrases."""
    fitness = beat.fitness and replace(beat.fitness, unfit=render_all(beat.fitness.unfit))
    attempts = tuple(replace(attempt, ranks=tuple(map(_readable, attempt.ranks))) for attempt in beat.attempts)
    return replace(beat, fitness=fitness, attempts=attempts)


def _readable(rank: RankStatus) -> RankStatus:
    if not (rank.evidence or rank.why_cold):
        return rank
    return replace(rank, evidence=render(rank.evidence), error=render(rank.error), why_cold=render(rank.why_cold))


def nodes(views: Sequence[NodeView], now: float, screen: Screen) -> list[str]:
    columns = [
        Column("NODE", shrinks=True), Column("STATE"), Column("RANKS", right=True), Column("CORES", right=True),
        Column("MEMORY", right=True), Column("GPUS", right=True), Column("STANDBY", right=True),
        Column("HEARD", right=True), Column("ADDRESS"), Column("JOBS", shrinks=True),
    ]  # fmt: skip
    rows: list[Row] = []
    for view in views:
        beat = view.beat
        jobs = dict.fromkeys(attempt.job for attempt in beat.attempts if any(r.state != "ended" for r in attempt.ranks))
        rows.append(
            [
                view.node,
                state(view, now),
                f"{view.used}/{len(beat.devices) or beat.cores}",
                str(beat.cores),
                f"{beat.memory_mb / 1024:.1f} GB",
                str(len(beat.devices)) if beat.devices else ABSENT,
                f"{beat.standby_mb} MB" if beat.standby_mb else ABSENT,
                ago(view.heard, now),
                beat.host,
                ", ".join(jobs) or ABSENT,
            ]
        )
    return table(columns, rows, screen)


def state(view: NodeView, now: float) -> Cell:
    if now - view.heard > SILENT_SECONDS:
        return Cell("silent", "red")
    if view.beat.leaving:
        return Cell("leaving", "yellow")
    if view.drained:
        return Cell("drained", "yellow")
    if view.beat.fitness is not None and view.beat.fitness.unfit:
        return Cell("not fit", "red")
    return Cell("one job's", "dim") if view.beat.tied else Cell("ready", "green")
