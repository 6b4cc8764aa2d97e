"""The allocation of loaders as tables: jobs, nodes, the rules in force, all objectives, and the latest decisions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from torchloom.protocol.scheduling import (
    JobStanding,
    LoadersAllocated,
    NodeBudget,
    ObjectiveName,
    PastAllocation,
    PolicyName,
    ScheduledJob,
    ScheduleScores,
    ScheduleView,
    Throughput,
    Trigger,
)
from torchloom.views.format.numbers import clock, duration, number
from torchloom.views.format.tables import Cell, Column, Screen, table, wrapped
from torchloom.views.wording.phrases import names

POLICIES: Mapping[PolicyName, str] = {
    "ours": "each loader goes to the job that gains most by it",
    "even": "the loaders of a node are divided evenly among its ranks",
    "requested": "each job has what its script requested, as far as it fits",
    "torchloader": "in the order of arrival, each job gets what is enough for it",
    "off": "nothing is moved, and jobs have the loaders that they requested",
}
"""What each policy does."""
OBJECTIVES: Mapping[ObjectiveName, str] = {
    "share": "speeds of all jobs as parts of their best, added up",
    "samples": "samples/s of all jobs, added up",
    "log": "logarithms of those parts, added up: no job starves",
    "makespan": "time until the last job has ended",
}
"""What each objective is."""
STANDINGS: Mapping[JobStanding, str] = {
    "scheduled": "",
    "unmeasured": "not measured yet; its loaders are allocated by a guess until it is",
    "pinned": "its loaders are set by an operator, and stay until `loom revert`",
    "paused": "its training is paused; others use its loaders until it continues",
    "no_loaders": "it has no ElasticLoader, and is left alone",
    "no_budget": "the budget of its node is not known; `loom schedule --budget NODE=N` sets it",
}
"""What is to be said of jobs besides the table."""
TRIGGERS: Mapping[Trigger, str] = {
    "arrival": "start",
    "departure": "end",
    "paused": "pause",
    "limits": "new limits",
    "budget": "new budget",
    "measured": "first measurements",
    "drift": "measurements",
    "rules": "new rules",
    "again": "another try",
}
"""Why loaders were allocated."""
HINT = "`loom schedule --policy ours` lets torchLoom move loaders"
LATEST = 5
"""Allocations that are listed."""
_WIDE = 96
"""Columns of a terminal that has room for all columns of the table."""


def schedule(view: ScheduleView, screen: Screen) -> list[str]:
    rules, lines = view.rules, _rules(view, screen)
    if view.jobs:
        lines += ["", *_jobs(view, screen), *_notes(view, screen)]
    else:
        lines += ["", "no job runs"]
    if view.nodes:
        lines += ["", *_nodes(view.nodes, view.jobs, screen)]
    if view.scores is not None:
        lines += ["", *_scores(view.scores, view.jobs, rules.objective, screen)]
    if view.past:
        lines += ["", *_past(view.past[-LATEST:], view.now, screen)]
    if rules.policy == "off" and any(job.loaders is not None for job in view.jobs):
        lines += ["", *wrapped(f"→ {HINT}", screen.width, 2)]
    return lines


def amount(rate: float | None) -> str | None:
    """Samples/s, in three digits: no measurement is better."""
    return None if rate is None else number(rate, 3)


def predicted(throughput: Throughput) -> str:
    """`317 ±8`, `49.7 ±0.3`: the error has the decimal places of the prediction, and one digit at least."""
    shown = number(throughput.predicted, 3)
    places = len(shown.partition(".")[2])
    error = f"{throughput.error:,.{places}f}"
    return f"{shown} ±{error if float(error.replace(',', '')) else f'{throughput.error:.1g}'}"


def percent(share: float) -> str:
    return f"{share:.0%}".replace("%", " %")


def _rules(view: ScheduleView, screen: Screen) -> list[str]:
    rules = view.rules
    lines = [(f"policy {rules.policy}", POLICIES[rules.policy], "yellow" if rules.policy == "off" else "bold")]
    if rules.policy == "ours":
        lines.append((f"objective {rules.objective}", OBJECTIVES[rules.objective], "bold"))
    return [
        line.replace(name, screen.paint(name, style), 1)
        for name, text, style in lines
        for line in wrapped(f"{name}: {text}", screen.width, 2)
    ]


# ── jobs ──


def _jobs(view: ScheduleView, screen: Screen) -> list[str]:
    is_off, is_wide = view.rules.policy == "off", screen.width is None or screen.width >= _WIDE
    differs = any(job.loaders is not None and job.requested != (job.target or job.loaders) for job in view.jobs)
    columns: list[Column[ScheduledJob]] = [
        Column("JOB", lambda job: job.job, shrinks=True),
        Column("RANKS", lambda job: str(sum(job.ranks.values())), right=True),
        Column("LOADERS", _loaders, right=True),
    ]
    if differs or is_wide or not is_off:
        columns.append(Column("REQUESTED", lambda job: _count(job.requested), right=True))
    if is_off or (is_wide and view.rules.policy != "ours"):
        columns.append(Column("OURS", _ours, right=True))
    columns += [
        Column("SAMPLES/S", lambda job: amount(job.now.measured) if job.now is not None else None, right=True),
        Column("PREDICTED", lambda job: predicted(job.now) if job.now is not None else None, right=True),
        Column("OF BEST", lambda job: _of_best(job.now), right=True),
        Column("STANDING", _standing),
    ]
    return table(columns, view.jobs, screen)


def _count(loaders: int | None) -> str | None:
    return None if loaders is None else f"{loaders:,}"


def _loaders(job: ScheduledJob) -> str | Cell | None:
    if job.target is None:
        return _count(job.loaders)
    return Cell(f"{_count(job.loaders)} → {_count(job.target)}", "cyan")


def _ours(job: ScheduledJob) -> str | Cell | None:
    differs = job.ours is not None and job.ours != job.loaders
    return Cell(f"{job.ours:,}", "cyan") if differs else _count(job.ours)


def _of_best(now: Throughput | None) -> Cell | None:
    if now is None:
        return None
    return Cell(percent(now.share), "green" if now.share >= 0.9 else "yellow" if now.share < 0.5 else "")


def _standing(job: ScheduledJob) -> Cell:
    text = job.standing.replace("_", " ")
    return Cell(text, "" if job.standing == "scheduled" else "yellow" if job.standing == "no_budget" else "dim")


def _notes(view: ScheduleView, screen: Screen) -> list[str]:
    """A line for each standing in the table that is not the normal one."""
    lines: list[str] = []
    for standing in dict.fromkeys(job.standing for job in view.jobs):
        text = STANDINGS[standing]
        if standing == "paused" and view.rules.policy == "off":
            text = "its training is paused"
        if standing == "unmeasured" and view.rules.policy == "off":
            text = "not measured yet; it takes some batches"
        if text:
            lines += wrapped(f"{standing.replace('_', ' ')}: {text}", screen.width, 2)
    return [screen.paint(line, "dim") for line in lines]


# ── nodes ──


def _nodes(nodes: Iterable[NodeBudget], jobs: Sequence[ScheduledJob], screen: Screen) -> list[str]:
    columns: list[Column[NodeBudget]] = [
        Column("NODE", lambda node: node.node, shrinks=True),
        Column("USED/BUDGET", _used, right=True),
        Column("SET BY", lambda node: "operator" if node.is_set else None if node.budget is None else "agent"),
        Column("LOADERS OF", lambda node: _shares_of(node.node, jobs), shrinks=True),
    ]
    return table(columns, nodes, screen)


def _used(node: NodeBudget) -> Cell:
    if node.budget is None:
        return Cell(f"{node.used:,} of ?", "yellow")
    return Cell(f"{node.used:,} of {node.budget:,}", "yellow" if node.used > node.budget else "")


def _shares_of(node: str, jobs: Iterable[ScheduledJob]) -> str:
    """`hungry 2×3, light 1`: ranks there, and loaders of each."""
    return ", ".join(
        f"{job.job} {f'{count}×' if (count := job.ranks[node]) != 1 else ''}{job.loaders:,}"
        for job in jobs
        if node in job.ranks and job.loaders
    )


# ── objectives and decisions ──


def _scores(
    scores: ScheduleScores, jobs: Iterable[ScheduledJob], objective: ObjectiveName, screen: Screen
) -> list[str]:
    best = sum(job.weight for job in jobs if job.standing in {"scheduled", "unmeasured", "pinned"})
    values: Mapping[ObjectiveName, str | None] = {
        "share": f"{scores.share:.2f} of {best:g}",
        "samples": f"{number(scores.samples, 3)} samples/s",
        "log": f"{round(scores.log, 2) + 0.0:.2f}",
        "makespan": None if scores.makespan is None else duration(scores.makespan),
    }
    columns: list[Column[ObjectiveName]] = [
        Column("OBJECTIVE", lambda name: Cell(name, "bold" if name == objective else "")),
        Column("PREDICTED", lambda name: values[name], right=True),
        Column("MEANING", lambda name: OBJECTIVES[name], shrinks=True),
    ]
    return table(columns, OBJECTIVES, screen)


def _past(past: Iterable[PastAllocation], now: float, screen: Screen) -> list[str]:
    columns: list[Column[PastAllocation]] = [
        Column("ALLOCATED", lambda each: clock(each.at, now)),
        Column("GAIN", lambda each: _gain(each.record.gain), right=True),
        Column("LOADERS OF EACH RANK", lambda each: moves_of(each.record), shrinks=True),
        Column("AFTER", lambda each: reason_of(each.record), shrinks=True),
    ]
    return table(columns, past, screen)


def _gain(gain: float | None) -> str | None:
    return None if gain is None else f"{'+' if gain > 0 else ''}{percent(gain)}"


def moves_of(record: LoadersAllocated) -> str:
    """`hungry 3 → 7, light 3 → 1`."""
    return ", ".join(f"{move.job} {move.before} → {move.loaders}" for move in record.moves)


def reason_of(record: LoadersAllocated) -> str:
    """`arrival of hungry`. Changed rules concern everybody."""
    texts = [TRIGGERS[trigger] for trigger in record.triggers]
    why = ", ".join(texts[:-1]) + " and " + texts[-1] if len(texts) > 1 else "".join(texts)
    about = () if record.triggers == ("rules",) else record.about
    return f"{why} of {names(about)}" if about else why
