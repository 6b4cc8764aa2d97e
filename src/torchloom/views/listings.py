"""The tables that a screen consists of: jobs, ranks, devices, incidents, knobs, changes, nodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torchloom.knobs import describe
from torchloom.protocol.knob_values import Value
from torchloom.protocol.node import Reading
from torchloom.protocol.views import ChangeView, DeviceView, IncidentView, JobView, KnobView, NodeView, RankView
from torchloom.views.format.numbers import ABSENT, number, value
from torchloom.views.format.short_names import name_of, short, short_devices
from torchloom.views.format.tables import Cell, Column, Row, Screen, cut, table
from torchloom.views.format.times import ago, clock, coarse

_STYLES = {
    "live": "green", "running": "green", "healthy": "green", "ok": "green", "finished": "dim", "left": "dim",
    "lost": "yellow", "stopped": "yellow", "paused": "yellow", "dead": "red", "failed": "red", "evicted": "yellow",
    "drained": "dim",
}  # fmt: skip
_CHANGE_STYLES = {"aborted": "yellow", "committed": "cyan", "proposed": "cyan"}
SILENT_SECONDS = 6.0
"""After which an agent that beats every second is missed."""
_ROOMY = 110
"""Columns of a terminal from which on a decision stands beside an incident."""
_DECISION = 24
_URGENCY = {"dead": 0, "failed": 0, "lost": 1, "evicted": 1, "live": 2}


def state(word: str) -> Cell:
    """A state in its colour; words of newer weavers stay plain."""
    return Cell(word, _STYLES.get(word, ""))


def jobs(views: Sequence[JobView], now: float, screen: Screen) -> list[str]:
    columns = [
        Column("JOB", shrinks=True), Column("PHASE"), Column("RANKS", right=True), Column("STEP", right=True),
        Column("LOSS", right=True), Column("SAMPLES/S", right=True), Column("BEGAN"), Column("ENDED"),
        Column("REASON", shrinks=True),
    ]  # fmt: skip
    rows: list[Row] = [
        [
            job.job,
            state("paused" if job.paused and job.phase == "running" else job.phase),
            f"{job.live}/{job.ranks}",
            ABSENT if job.step is None else f"{job.step:,}",
            number(job.loss),
            number(job.samples_per_second),
            clock(job.began, now),
            ABSENT if job.ended is None else clock(job.ended, now),
            job.reason or ABSENT,
        ]
        for job in views
    ]
    return table(columns, rows, screen)


def ranks(views: Sequence[RankView], now: float, screen: Screen) -> list[str]:
    """Those in trouble first, then by name."""
    columns = [
        Column("JOB", shrinks=True), Column("REPLICA", shrinks=True), Column("RANK", right=True), Column("PRESENCE"),
        Column("STEP", right=True), Column("LOSS", right=True), Column("SAMPLES/S", right=True),
        Column("HEARD", right=True), Column("NODE", shrinks=True), Column("DEVICES", shrinks=True),
    ]  # fmt: skip
    rows: list[list[str | Cell]] = []
    listed = sorted(views, key=lambda v: (_URGENCY.get(_presence(v), 3), v.rank))
    for view in listed:
        beat = view.beat
        bad_loss = beat is not None and "loss" in beat.not_finite
        rows.append(
            [
                view.rank.job,
                view.rank.replica,
                str(view.rank.rank),
                state(_presence(view)),
                ABSENT if beat is None else f"{beat.step:,}" + (" counted" if view.counted else ""),
                Cell("not finite", "red") if bad_loss else ABSENT if beat is None else number(beat.loss),
                ABSENT if beat is None else number(beat.samples_per_second),
                ABSENT if view.heard is None else ago(view.heard, now),
                view.node,
                ", ".join(view.devices) or ABSENT,
            ]
        )
    if any(view.member for view in views):
        columns[7:7] = [Column("QUORUM", right=True)]
        columns.append(Column("TORCHFT ID", shrinks=True))
        for row, view in zip(rows, listed, strict=True):
            row[7:7] = [_quorum(view)]
            row.append(view.member or ABSENT)
    return table(columns, rows, screen)


def _presence(view: RankView) -> str:
    """With what is known beyond it: one that lives may be of no use, and one that left be awaited."""
    if view.evicted and view.presence in {"live", "lost"}:
        return "evicted"
    return "drained" if view.drained and view.presence == "left" else view.presence


def _quorum(view: RankView) -> str:
    """Its number, and how many replicas are in it."""
    beat = view.beat
    if beat is None or beat.quorum is None:
        return ABSENT
    return f"{beat.quorum:,}" + (f" ({beat.participants})" if beat.participants is not None else "")


def devices(views: Sequence[DeviceView], now: float, screen: Screen) -> list[str]:
    columns = [
        Column("DEVICE", shrinks=True), Column("NODE", shrinks=True), Column("HEALTH"), Column("SINCE"),
        Column("CAUSE", shrinks=True), Column("REPLICAS", shrinks=True),
    ]  # fmt: skip
    rows: list[list[str | Cell]] = [
        [
            device.device,
            device.node or ABSENT,
            state(device.health),
            clock(device.since, now) if device.since else ABSENT,
            device.cause or ABSENT,
            ", ".join(map(str, device.replicas)) or ABSENT,
        ]
        for device in views
    ]
    if any(device.reading is not None for device in views):
        columns[3:3] = [Column("USE", right=True), Column("MEMORY", right=True), Column("TEMP", right=True)]
        for row, device in zip(rows, views, strict=True):
            row[3:3] = _readings(device.reading)
    return table(columns, rows, screen)


def _readings(reading: Reading | None) -> list[str | Cell]:
    """Use, memory and temperature, as far as the device tells them."""
    if reading is None:
        return [ABSENT, ABSENT, ABSENT]
    use, held, total, heat = reading.utilisation, reading.memory_mb, reading.memory_total_mb, reading.temperature
    slow = "yellow" if reading.throttled else ""
    return [
        ABSENT if use is None else f"{use:.0f} %",
        ABSENT if held is None or total is None else f"{held / 1024:.1f}/{total / 1024:.0f} GB",
        ABSENT if heat is None else Cell(f"{heat:.0f} °C", slow),
    ]


def incidents(views: Sequence[IncidentView], now: float, screen: Screen) -> list[str]:
    """One line for each; `loom why` tells the rest. What went wrong has the room, the less there is the more so."""
    narrow = screen.width is not None and screen.width < _ROOMY
    columns = [
        Column("ID"), Column("AGE", right=True), Column("KIND"), Column("ABOUT", shrinks=True), Column("STATE"),
        Column("WHAT", shrinks=True), *([] if narrow else [Column("DECISION", shrinks=True)]),
    ]  # fmt: skip
    devices = short_devices(i.about.device for i in views if i.about.device) if screen.width is not None else {}
    rows: list[Row] = []
    for incident in views:
        about, what = incident.job or name_of(incident.about), short(incident)
        if incident.about.device in devices:
            about = devices[incident.about.device]
            told = incident.short if narrow and what == incident.what else what  # its name stands beside it
            what = told.replace(incident.about.device, about)
        over = "over" if narrow or incident.closed is None else f"over in {coarse(incident.closed - incident.opened)}"
        decision = incident.brief or ABSENT
        rows.append(
            [
                incident.id,
                coarse(now - incident.opened),
                incident.kind or ABSENT,
                about,
                Cell("open", "red") if incident.closed is None else Cell(over, "dim"),
                what,
                *([] if narrow else [decision if screen.width is None else cut(decision, _DECISION)]),
            ]
        )
    return table(columns, rows, screen)


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
            Cell(f"{view.phase}: {view.outcome}" if view.outcome else view.phase, _CHANGE_STYLES.get(view.phase, "")),
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
                _node_state(view, now),
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


def _node_state(view: NodeView, now: float) -> Cell:
    if now - view.heard > SILENT_SECONDS:
        return Cell("silent", "red")
    if view.beat.leaving:
        return Cell("leaving", "yellow")
    if view.drained:
        return Cell("drained", "yellow")
    if view.beat.fitness is not None and view.beat.fitness.unfit:
        return Cell("not fit", "red")
    return Cell("one job's", "dim") if view.beat.tied else Cell("ready", "green")
