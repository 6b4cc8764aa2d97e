"""A policy as a table: what can go wrong, and what is done about it."""

from __future__ import annotations

from torchloom.core.detect.kinds_and_responses import KINDS
from torchloom.core.incidents.rule_lookup import DEFAULTS, planned, rule_for
from torchloom.job.policy_syntax import written
from torchloom.protocol.job_spec import EventKind, Rule, Task
from torchloom.protocol.message import Part
from torchloom.settings import Settings
from torchloom.views.format.numbers import delay
from torchloom.views.format.tables import Cell, Column, Screen, table
from torchloom.views.wording.phrases import render_all


class PolicyRow(Part, frozen=True):
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
    return [
        PolicyRow.from_fields(
            rule,
            event=rule.on,
            explained=KINDS[rule.on].explanation,
            told=render_all(planned(response) for response in rule.do),
            after=patience(rule, settings),
            own=rule.on in own,
            rule=written(rule),
        )
        for rule in (rule_for(task, event) for event in DEFAULTS)
    ]


def patience(rule: Rule, settings: Settings) -> float:
    """How long it may last, at least, before anything is done."""
    if rule.after is not None:
        return rule.after
    setting = KINDS[rule.on].patience
    return float(getattr(settings, setting)) if setting else 0.0


def lines(rows: list[PolicyRow], task: Task | None, screen: Screen) -> list[str]:
    columns: list[Column[PolicyRow]] = [
        Column("EVENT", lambda row: Cell(row.event, "bold" if row.own else "")),
        Column("RESPONSE", _responses, shrinks=True),
        Column("AFTER", lambda row: delay(row.after) if row.after else None, right=True),
        Column("OWN", lambda row: Cell("yes", "bold") if row.own else Cell("-", "dim")),
        Column("WHAT IT IS", lambda row: row.explained, shrinks=True),
    ]
    if any(row.limit is not None for row in rows):
        columns.insert(3, Column("LIMIT", lambda row: None if row.limit is None else str(row.limit), right=True))
    shown = table(columns, rows, screen)
    if task is not None and task.dry_run:
        shown.append(screen.paint("a dry run: what would be done is only told in the incident", "yellow"))
    return shown


def _responses(row: PolicyRow) -> str:
    more = f" back={row.back}" if row.back != 1 else ""
    return "+".join(row.do) + more + (" skip" if row.skip else "")
