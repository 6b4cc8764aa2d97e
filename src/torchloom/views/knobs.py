"""The knobs of a job: what may be changed, within which bounds, and who did so last."""

from __future__ import annotations

from collections.abc import Sequence

from torchloom.knobs import describe
from torchloom.protocol.views import KnobView
from torchloom.views.format.numbers import ABSENT, value
from torchloom.views.format.tables import Column, Row, Screen, table
from torchloom.views.format.times import clock


def knobs(views: Sequence[KnobView], now: float, screen: Screen) -> list[str]:
    columns = [
        Column("NAME"), Column("VALUE", shrinks=True), Column("BOUNDS", shrinks=True), Column("UNIT"),
        Column("CHANGED"), Column("BY", shrinks=True), Column("HELP", shrinks=True),
    ]  # fmt: skip
    rows: list[Row] = [
        [
            view.spec.name,
            ", ".join([value(view.value), *(f"{value(v)} in {r}" for r, v in view.elsewhere.items())]),
            describe(view.spec) + (", per rank" if view.spec.per == "rank" else ""),
            view.spec.unit or ABSENT,
            ABSENT if view.changed is None else f"{clock(view.changed, now)} {view.change}".rstrip(),
            view.changed_by or ABSENT,
            view.spec.help or ABSENT,
        ]
        for view in sorted(views, key=lambda v: v.spec.name)
    ]
    return table(columns, rows, screen)
