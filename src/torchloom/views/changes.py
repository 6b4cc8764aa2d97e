"""The changes of a job, newest first: who, when, from what to what, at which step, and its outcome."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torchloom.protocol.knob_values import Value
from torchloom.protocol.views import ChangeView
from torchloom.views.format.numbers import ABSENT, value
from torchloom.views.format.tables import Cell, Column, Row, Screen, table
from torchloom.views.format.times import clock

_STYLES = {"aborted": "yellow", "committed": "cyan", "proposed": "cyan"}


def changes(views: Sequence[ChangeView], now: float, screen: Screen) -> list[str]:
    columns = [
        Column("ID"), Column("WHEN"), Column("WHO", shrinks=True), Column("WHAT", shrinks=True),
        Column("STEP", right=True), Column("OUTCOME", shrinks=True), Column("REVERTED BY"),
    ]  # fmt: skip
    rows: list[Row] = [
        [
            view.id,
            clock(view.asked, now),
            view.operator or ABSENT,
            moved(view.action, view.values, view.before, view.over)
            + ("" if view.target == view.job else f" on {view.target}"),
            f"{view.step:,}",
            Cell(f"{view.phase}: {view.outcome}" if view.outcome else view.phase, _STYLES.get(view.phase, "")),
            view.reverted_by or ABSENT,
        ]
        for view in views
    ]
    return table(columns, rows, screen)


def moved(action: str, values: Mapping[str, Value], before: Mapping[str, Value], over: int = 0) -> str:
    """`lr 0.1 → 0.01, clip 1 → 2 over 100 steps`, or the action's own name."""
    if action != "set":
        return action
    moves = (
        f"{name} {value(before[name])} → {value(new)}" if name in before else f"{name} → {value(new)}"
        for name, new in values.items()
    )
    return ", ".join(moves) + (f" over {over:,} steps" if over else "")
