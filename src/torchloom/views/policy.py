"""A policy as a table: what can go wrong, and what is done about it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import get_args

import msgspec

from torchloom.core.incidents.policy import DEFAULTS, planned, rule_for
from torchloom.job.policy_syntax import written
from torchloom.protocol.job import EventKind, Rule, Task
from torchloom.settings import Settings
from torchloom.views.format.numbers import ABSENT
from torchloom.views.format.tables import Cell, Column, Row, Screen, table
from torchloom.views.wording.phrases import render_all

EXPLAINED: Mapping[EventKind, str] = {
    "crash": "a rank's process ended badly",
    "hang": "a rank makes no step, its peers wait",
    "frozen": "a rank's process is stopped",
    "held": "a thread keeps the interpreter",
    "straggler": "a rank is slower than its peers",
    "not_finite": "a loss or metric is NaN or infinite",
    "loss_spike": "the loss jumped far above its past",
    "gradient": "a gradient norm jumped or overflows",
    "starved": "a rank's steps wait for data",
    "slowdown": "steps take longer than they used to",
    "memory": "memory will soon be full",
    "overdue": "a checkpoint should have come by now",
    "device": "a device is said to be broken",
    "device_warning": "a device is hot, throttled or ageing",
}
"""Short enough for one line on a narrow terminal."""
assert set(EXPLAINED) == set(get_args(EventKind))


class PolicyRow(msgspec.Struct, frozen=True, kw_only=True):
    """What is done about one kind of trouble."""

    event: EventKind
    explained: str
    do: tuple[str, ...]
    told: tuple[str, ...]
    """The same as sentences."""
    after: float
    """Seconds it may last before anything is done."""
    limit: int | None
    """Most often within the job's window of restarts."""
    back: int
    skip: bool
    own: bool
    """The job says so itself; otherwise it is the default."""
    rule: str
    """As it would be written."""


def policy(task: Task | None, settings: Settings) -> list[PolicyRow]:
    """The whole table of a job, or the default one."""
    own = {rule.on for rule in task.policy} if task is not None else set()
    return [_row(rule_for(task, event), settings, own=event in own) for event in DEFAULTS]


def _row(rule: Rule, settings: Settings, own: bool) -> PolicyRow:
    return PolicyRow(
        event=rule.on,
        explained=EXPLAINED[rule.on],
        do=rule.do,
        told=render_all(planned(response) for response in rule.do),
        after=patience(rule, settings),
        limit=rule.limit,
        back=rule.back,
        skip=rule.skip,
        own=own,
        rule=written(rule),
    )


def patience(rule: Rule, settings: Settings) -> float:
    """How long it may last, at least, before anything is done."""
    if rule.after is not None:
        return rule.after
    return {
        "hang": settings.hang_act_seconds,
        "frozen": settings.frozen_act_seconds,
        "held": settings.held_act_seconds,
    }.get(rule.on, 0.0)


def lines(rows: list[PolicyRow], task: Task | None, screen: Screen) -> list[str]:
    limited = any(row.limit is not None for row in rows)
    columns = [
        Column("EVENT"), Column("RESPONSE", shrinks=True), Column("AFTER", right=True),
        *([Column("LIMIT", right=True)] if limited else []), Column("OWN"), Column("WHAT IT IS", shrinks=True),
    ]  # fmt: skip
    cells: list[Row] = [
        [
            Cell(row.event, "bold" if row.own else ""),
            _responses(row),
            f"{row.after:g} s" if row.after else ABSENT,
            *([ABSENT if row.limit is None else str(row.limit)] if limited else []),
            Cell("yes", "bold") if row.own else Cell(ABSENT, "dim"),
            row.explained,
        ]
        for row in rows
    ]
    found = table(columns, cells, screen)
    if task is not None and task.dry_run:
        found.append(screen.paint("a dry run: what would be done is only told in the incident", "yellow"))
    return found


def _responses(row: PolicyRow) -> str:
    more = f" back={row.back}" if row.back != 1 else ""
    return "+".join(row.do) + more + (" skip" if row.skip else "")
