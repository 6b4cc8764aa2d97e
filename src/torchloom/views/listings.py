"""The tables that a screen consists of: jobs, ranks, devices, incidents, knobs, changes, nodes."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from torchloom.knob_validation import describe
from torchloom.protocol.rank import Value
from torchloom.protocol.records import About
from torchloom.protocol.views import ChangeView, DeviceView, IncidentView, JobView, KnobView, NodeView, RankView
from torchloom.views.format.numbers import ABSENT, ago, clock, coarse, number, value
from torchloom.views.format.tables import Cell, Column, Screen, cut, table

_STYLES = {
    "live": "green", "running": "green", "healthy": "green", "ok": "green", "finished": "dim", "left": "dim",
    "lost": "yellow", "stopped": "yellow", "paused": "yellow", "dead": "red", "failed": "red", "evicted": "yellow",
    "drained": "dim", "released": "yellow",
}  # fmt: skip
_CHANGE_STYLES = {"aborted": "yellow", "committed": "cyan", "proposed": "cyan"}
SILENT_SECONDS = 6.0
"""After which an agent that beats every second is missed."""
_ROOMY = 110
"""Columns of a terminal from which on a decision stands beside an incident."""
_DECISION = 24
_URGENCY = {"dead": 0, "failed": 0, "lost": 1, "evicted": 1, "live": 2}
_UUID_HEAD = re.compile(r"[A-Z]+-[0-9a-f]{8}(?=(-[0-9a-f]{4}){3}-[0-9a-f]{12}$)")


def state(word: str) -> Cell:
    """A state in its colour; words of newer weavers stay plain."""
    return Cell(word, _STYLES.get(word, ""))


def jobs(views: Sequence[JobView], now: float, screen: Screen) -> list[str]:
    columns: list[Column[JobView]] = [
        Column("JOB", lambda job: job.job, shrinks=True),
        Column("PHASE", lambda job: state("paused" if job.paused and job.phase == "running" else job.phase)),
        Column("RANKS", lambda job: f"{job.live}/{job.ranks}", right=True),
        Column("STEP", lambda job: None if job.step is None else f"{job.step:,}", right=True),
        Column("LOSS", lambda job: number(job.loss), right=True),
        Column("SAMPLES/S", lambda job: number(job.samples_per_second), right=True),
        Column("BEGAN", lambda job: clock(job.began, now)),
        Column("ENDED", lambda job: None if job.ended is None else clock(job.ended, now)),
        Column("REASON", lambda job: job.reason, shrinks=True),
    ]
    return table(columns, views, screen)


def ranks(views: Sequence[RankView], now: float, screen: Screen) -> list[str]:
    """Those in trouble first, then by name."""
    columns: list[Column[RankView]] = [
        Column("JOB", lambda view: view.rank.job, shrinks=True),
        Column("REPLICA", lambda view: view.rank.replica, shrinks=True),
        Column("RANK", lambda view: str(view.rank.rank), right=True),
        Column("PRESENCE", lambda view: state(_presence(view))),
        Column("STEP", _step, right=True),
        Column("LOSS", _loss, right=True),
        Column("SAMPLES/S", lambda view: number(view.beat.samples_per_second if view.beat else None), right=True),
        Column("HEARD", lambda view: None if view.heard is None else ago(view.heard, now), right=True),
        Column("NODE", lambda view: view.node, shrinks=True),
        Column("DEVICES", lambda view: ", ".join(view.devices), shrinks=True),
    ]
    if any(view.beat and view.beat.loading for view in views):
        columns.insert(7, Column("LOADERS", _loaders, right=True))
    if any(view.member for view in views):
        columns.insert(7, Column("QUORUM", _quorum, right=True))
        columns.append(Column("TORCHFT ID", lambda view: view.member, shrinks=True))
    return table(columns, sorted(views, key=lambda v: (_URGENCY.get(_presence(v), 3), v.rank)), screen)


def _presence(view: RankView) -> str:
    """With what is known beyond it: one that lives may be of no use, and one that left be awaited."""
    if view.evicted and view.presence in {"live", "lost"}:
        return "evicted"
    return "drained" if view.drained and view.presence == "left" else view.presence


def _step(view: RankView) -> str | None:
    return None if view.beat is None else f"{view.beat.step:,}" + (" counted" if view.counted else "")


def _loss(view: RankView) -> str | Cell:
    if view.beat is None:
        return ABSENT
    return Cell("not finite", "red") if "loss" in view.beat.not_finite else number(view.beat.loss)


def _loaders(view: RankView) -> str | None:
    """Their number, and how long training waits for a batch."""
    loading = view.beat.loading if view.beat is not None else None
    return None if loading is None else f"{loading.loaders} (wait {1000 * loading.wait:,.0f} ms)"


def _quorum(view: RankView) -> str | None:
    """Its number, and how many replicas are in it."""
    beat = view.beat
    if beat is None or beat.quorum is None:
        return None
    return f"{beat.quorum:,}" + (f" ({beat.participants})" if beat.participants is not None else "")


def devices(views: Sequence[DeviceView], now: float, screen: Screen) -> list[str]:
    columns: list[Column[DeviceView]] = [
        Column("DEVICE", lambda view: view.device, shrinks=True),
        Column("NODE", lambda view: view.node, shrinks=True),
        Column("HEALTH", lambda view: state(view.health)),
        Column("SINCE", lambda view: clock(view.since, now) if view.since else None),
        Column("CAUSE", lambda view: view.cause, shrinks=True),
        Column("REPLICAS", lambda view: ", ".join(map(str, view.replicas)), shrinks=True),
    ]
    if any(view.reading is not None for view in views):
        columns[3:3] = [
            Column("USE", _use, right=True),
            Column("MEMORY", _memory, right=True),
            Column("TEMP", _temperature, right=True),
        ]
    return table(columns, views, screen)


def _use(view: DeviceView) -> str | None:
    if view.reading is None or view.reading.utilisation is None:
        return None
    return f"{view.reading.utilisation:.0f} %"


def _memory(view: DeviceView) -> str | None:
    if view.reading is None or view.reading.memory_mb is None or view.reading.memory_total_mb is None:
        return None
    return f"{view.reading.memory_mb / 1024:.1f}/{view.reading.memory_total_mb / 1024:.0f} GB"


def _temperature(view: DeviceView) -> Cell | None:
    if view.reading is None or view.reading.temperature is None:
        return None
    return Cell(f"{view.reading.temperature:.0f} °C", "yellow" if view.reading.throttled else "")


def name_of(about: About) -> str:
    """What an incident is about, by its name."""
    return str(about.rank) if about.rank is not None else about.run or about.job or about.device or about.node


def short(incident: IncidentView) -> str:
    """What went wrong, without the name of the job; why ranks were ended, if they were, says more."""
    if incident.stopped and incident.reason:
        return incident.reason
    return incident.what if incident.about.device else incident.short or incident.what


def incidents(views: Sequence[IncidentView], now: float, screen: Screen) -> list[str]:
    """One line for each; `loom why` tells the rest. What went wrong has the room, the less there is the more so."""
    narrow = screen.width is not None and screen.width < _ROOMY
    devices = _short_devices(i.about.device for i in views if i.about.device) if screen.width is not None else {}

    def what(incident: IncidentView) -> str:
        device, text = incident.about.device, short(incident)
        if device not in devices:
            return text
        if narrow and text == incident.what:  # its name stands beside it
            text = incident.short
        return text.replace(device, devices[device])

    def ended(incident: IncidentView) -> Cell:
        if incident.closed is None:
            return Cell("open", "red")
        return Cell("over" if narrow else f"over in {coarse(incident.closed - incident.opened)}", "dim")

    columns: list[Column[IncidentView]] = [
        Column("ID", lambda incident: incident.id),
        Column("AGE", lambda incident: coarse(now - incident.opened), right=True),
        Column("KIND", lambda incident: incident.kind),
        Column("ABOUT", lambda one: devices.get(one.about.device) or one.job or name_of(one.about), shrinks=True),
        Column("STATE", ended),
        Column("WHAT", what, shrinks=True),
    ]
    if not narrow:
        width = None if screen.width is None else _DECISION
        columns.append(Column("DECISION", lambda incident: cut(incident.brief, width), shrinks=True))
    return table(columns, views, screen)


def _short_devices(names: Iterable[str]) -> dict[str, str]:
    """For each name of a device that holds a uuid, what is enough to tell it from the others: `GPU-307a982d`."""
    heads = {name: match[0] for name in set(names) if (match := _UUID_HEAD.match(name))}
    shared = Counter(heads.values())
    return {name: head for name, head in heads.items() if shared[head] == 1}


def knobs(views: Sequence[KnobView], now: float, screen: Screen) -> list[str]:
    def values(view: KnobView) -> str:
        return ", ".join([value(view.value), *(f"{value(v)} in {r}" for r, v in view.elsewhere.items())])

    def changed(view: KnobView) -> str | None:
        return None if view.changed is None else f"{clock(view.changed, now)} {view.change}".rstrip()

    columns: list[Column[KnobView]] = [
        Column("NAME", lambda view: view.spec.name),
        Column("VALUE", lambda view: Cell(values(view)), shrinks=True),
        Column(
            "BOUNDS", lambda view: describe(view.spec) + (", per rank" if view.spec.per == "rank" else ""), shrinks=True
        ),
        Column("UNIT", lambda view: view.spec.unit),
        Column("CHANGED", changed),
        Column("BY", lambda view: view.changed_by, shrinks=True),
        Column("HELP", lambda view: view.spec.help, shrinks=True),
    ]
    return table(columns, sorted(views, key=lambda v: v.spec.name), screen)


def changes(views: Sequence[ChangeView], now: float, screen: Screen) -> list[str]:
    def what(view: ChangeView) -> str:
        target = "" if view.target == view.job else f" on {view.target}"
        return moved(view.action, view.values, view.before, view.over) + target

    def outcome(view: ChangeView) -> Cell:
        text = f"{view.phase}: {view.outcome}" if view.outcome else view.phase
        return Cell(text, _CHANGE_STYLES.get(view.phase, ""))

    columns: list[Column[ChangeView]] = [
        Column("ID", lambda view: view.id),
        Column("WHEN", lambda view: clock(view.asked, now)),
        Column("WHO", lambda view: view.operator, shrinks=True),
        Column("WHAT", what, shrinks=True),
        Column("STEP", lambda view: f"{view.step:,}", right=True),
        Column("OUTCOME", outcome, shrinks=True),
        Column("REVERTED BY", lambda view: view.reverted_by),
    ]
    return table(columns, views, screen)


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
    columns: list[Column[NodeView]] = [
        Column("NODE", lambda view: view.node, shrinks=True),
        Column("STATE", lambda view: _node_state(view, now)),
        Column("RANKS", _ranks_on, right=True),
        Column("CORES", lambda view: str(view.beat.cores), right=True),
        Column("MEMORY", lambda view: f"{view.beat.memory_mb / 1024:.1f} GB", right=True),
        Column("GPUS", lambda view: str(len(view.beat.devices) or ABSENT), right=True),
        Column("STANDBY", lambda view: f"{view.beat.standby_mb} MB" if view.beat.standby_mb else None, right=True),
        Column("HEARD", lambda view: ago(view.heard, now), right=True),
        Column("ADDRESS", lambda view: view.beat.host),
        Column("JOBS", _jobs_on, shrinks=True),
    ]
    return table(columns, views, screen)


def _ranks_on(view: NodeView) -> Cell:
    """How many run there, of how many that it has devices or cores for; jobs that share may be more."""
    room = len(view.beat.devices) or view.beat.cores
    return Cell(f"{view.used} of {room}" if view.used > room else f"{view.used}/{room}", "yellow" * (view.used > room))


def _jobs_on(view: NodeView) -> str:
    running = (attempt for attempt in view.beat.attempts if any(rank.state != "ended" for rank in attempt.ranks))
    return ", ".join(dict.fromkeys(attempt.job for attempt in running))


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
