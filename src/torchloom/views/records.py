"""The log as people read it: one line per record, with the local time it was decided.

`ROWS` has a row for each type of record: its sentence and its colour. A sentence is a template over the fields of the
record (`views/wording/phrases.py` has the format), or a function where a template is not enough.

A registration reads as the projects torchLoom grew from print it: `Registered device: GPU-… for replica_id: …`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from msgspec.structs import asdict

from torchloom.core.state.change_ledger import abort_phrase
from torchloom.protocol import operator as requests
from torchloom.protocol import rank as reports
from torchloom.protocol import records as log
from torchloom.protocol import run_records as runs
from torchloom.protocol import scheduling
from torchloom.protocol.phrase import phrase
from torchloom.protocol.records import Entry, Record, named_jobs
from torchloom.views.answers import NAMED
from torchloom.views.format.json_document import plain
from torchloom.views.format.numbers import stamp
from torchloom.views.format.tables import Screen, clean
from torchloom.views.listings import moved, name_of
from torchloom.views.schedule_tables import moves_of, percent, reason_of
from torchloom.views.wording.phrases import fill, names, render, render_all


class Row(NamedTuple):
    text: str | Callable[[Any], str | list[str]]
    style: str | Callable[[Any], str] = ""
    more: Callable[[Any], dict[str, str]] = lambda _record: {}
    """What the template takes besides the fields of the record."""


def _registered(record: log.RankJoined) -> list[str]:
    rank, hello = record.rank, record.hello
    where = f"(job {rank.job}, rank {rank.rank} of {hello.world_size}, node {hello.node}, pid {hello.pid})"
    where += "; its steps are counted at its optimizer" if hello.counted else ""
    if not hello.devices:
        return [f"Rank {rank} joined without a device {where}"]
    return [f"Registered device: {device} for replica_id: {rank.replica} {where}" for device in hello.devices]


def _proposed(record: log.ChangeProposed) -> str:
    change = record.change
    moves = moved(change.action, change.values, record.before, change.over)
    return fill(
        "Change {change.id} asked by {operator:or|someone}: {moves} on {target} at step {change.step:,} ({lives:#rank})"
        "{reverts:?, reverting }",
        asdict(record) | {"moves": moves, "target": record.target},
    )


def _rules(record: requests.ScheduleSet) -> str:
    how = "Loaders are not allocated" if record.policy == "off" else f"Loaders are allocated by policy {record.policy}"
    objective = f", objective {record.objective}" if record.policy == "ours" else ""
    by = f" ({record.operator})" if record.operator else ""
    budgets = ", ".join(f"{node} {budget:,}" for node, budget in sorted(record.budgets.items()))
    return f"{how}{objective}{by}{f'; budgets set: {budgets}' if budgets else ''}"


def _allocated(record: scheduling.LoadersAllocated) -> str:
    gain = f", {percent(record.gain)} more predicted" if record.gain and record.gain >= 0.005 else ""
    return f"Loaders of each rank: {moves_of(record)} (after {reason_of(record)}{gain})"


def _verdict(record: log.ChangeDecided) -> str:
    reason = abort_phrase(record.abort) if record.abort else phrase("all_ranks_ready") if record.commit else ""
    return fill("Change {id} {commit:if|decided|was not made}{reason:?: }", asdict(record) | {"reason": reason})


def _order(record: log.OrderGiven) -> str:
    ranks = names((rank for rank, _ in record.lives), NAMED)
    return fill("Order {id} given by {operator:or|someone}: {verb} {ranks}", asdict(record) | {"ranks": ranks})


def _member(record: reports.MemberJoined) -> list[str]:
    member = "Rank {rank} is in replica {member} of torchft{version:? }{lighthouse:?, with the lighthouse at }"
    devices = [f"Registered device: {device} for replica_id: {record.member}" for device in record.devices]
    return [fill(member, asdict(record)), *devices]


def _submitted(record: runs.RunSubmitted) -> str:
    fields = {"command": " ".join(record.task.argv)[:200], "count": record.task.world_size}
    return fill("Job {job} submitted{operator:? by }: {command} on {count:#rank}", asdict(record) | fields)


def _placed(record: runs.AttemptBegan) -> str:
    nodes = ", ".join(dict.fromkeys(place.node for place in record.places))
    return fill("Job {job} is placed: {places:#rank} on {nodes}", asdict(record) | {"nodes": nodes})


def _launched(record: runs.AttemptLaunched) -> str:
    source = "from {resume}{resume_step:? (step |)}" if record.resume else "from the beginning"
    how = "and heals from the others" if record.heals else f"{source}{{rejected:?; passed over: }}"
    return fill(f"Job {{job}} starts {how}", asdict(record))


def _incident_texts(record: log.IncidentRecord) -> dict[str, str]:
    """The reason belongs to a decision, and is not shown without one."""
    reason = f" ({render(record.reason)})" if record.decision and record.reason else ""
    return {"reason": reason, "evidence": "; ".join(render_all(record.evidence))}


AFTER = {
    "restart": "then started again",
    "fail": "and given up",
    "cancel": "as asked",
    "done": "for there is nothing more to do",
    "release": "and gives its devices back",
}
"""What happens to a run after its attempt has ended."""
_ENDED = {"stopped": "yellow", "failed": "red"}

ROWS: Mapping[type[Record], Row] = {
    log.TermBegan: Row("Term {term} began: weaver {weaver} is in charge"),
    log.JobBegan: Row("Job {job} began"),
    log.JobEnded: Row(
        "Job {job} {was}{outcome}{reason:?: }",
        lambda record: _ENDED.get(record.outcome, ""),
        lambda record: {"was": "was " * (record.outcome == "stopped")},
    ),
    log.JobForgotten: Row("Job {job} forgotten: it ended long ago"),
    log.RankJoined: Row(_registered),
    log.RankAttached: Row("Rank {rank} is attached by its script; its steps are counted no longer"),
    log.RankLost: Row("Rank {rank} lost{reason:?: }{patient:if| (it may be frozen, not dead)}", "yellow"),
    log.RankFound: Row("Rank {rank} found again{reason:?: }", "green"),
    log.RankDied: Row("Rank {rank} died{reason:?: }{confirmed:if|| (presumed)}", "red"),
    log.RankLeft: Row("Rank {rank} left: {how}"),
    log.RankForgotten: Row("Rank {rank} forgotten: gone for long"),
    log.DeviceRegistered: Row(
        "Registered device: {device} for replica_id: {replica.replica} (job {replica.job}{node:?, node }, "
        "by {operator:or|hand})"
    ),
    log.DeviceBlamed: Row("Device {device} is said to be broken ({blame.by}): {blame.cause}"),
    log.DeviceCleared: Row("Device {device} is not said to be broken any more by {by}"),
    log.DeviceMarkedFailed: Row(
        "Device {device} failed: {cause} (said by {source}); "
        "{replicas:if|replicas on it: {replicas}|no replica is on it}",
        "red",
    ),
    log.DeviceMarkedRecovered: Row("Device {device} recovered (said by {source})", "green"),
    log.IncidentOpened: Row(
        "Incident {id} opened: {name}: {what}{evidence:? [|]}{decision:?; decided: }{reason}",
        "red",
        lambda record: _incident_texts(record) | {"name": name_of(record.about)},
    ),
    log.IncidentAmended: Row(
        "Incident {id} {closed:if|closed|amended}{evidence:?: }{decision:?; decided: }{reason}{outcome:?; outcome: }",
        more=_incident_texts,
    ),
    log.KnobsOffered: Row(
        "Job {job} offers knobs: {names}{checkpoints:if|; it saves checkpoints when asked}",
        more=lambda record: {"names": ", ".join(knob.name for knob in record.knobs) or "none"},
    ),
    log.ChangeProposed: Row(_proposed),
    log.ChangeDecided: Row(_verdict, lambda record: "" if record.commit else "yellow"),
    log.ChangeSettled: Row("Change {id} settled: {outcome}"),
    log.OrderGiven: Row(_order),
    log.OrderEnded: Row("Order {id} ended: {outcome}"),
    reports.CheckpointSaved: Row(
        "Checkpoint of {rank.job} at step {step:,} written to {folder} on {node}: {size:bytes} in {seconds:.2f} s, "
        "training stood still for {stall:.2f} s"
    ),
    reports.CheckpointFailed: Row(
        "Checkpoint of {rank.job} at step {step:,} could not be written to {folder}: {why}", "yellow"
    ),
    reports.JobResumed: Row(
        "Job {rank.job} resumed at step {step:,} from {path} (rank {rank.replica}/{rank.rank})"
        "{rejected:?; newer ones are damaged: }"
    ),
    reports.MemberJoined: Row(_member),
    reports.MemberRegrouped: Row(
        "Replica {rank.replica_id} is in quorum {quorum:,} of {participants:#replica}, at step {step:,}"
    ),
    reports.MemberHealed: Row("Replica {rank.replica_id} healed{source:? from } to step {step:,} in {seconds:.2f} s"),
    reports.MemberDiscarded: Row(
        "Replica {rank.replica_id} did not commit {count:one|step {step:,}|{count:,} tries up to step {step:,}} "
        "(quorum {quorum:,}){why:?: }",
        "yellow",
    ),
    log.MembersEvicted: Row("Evicted from the quorum of {job}: {members}{reason:?: }", "yellow"),
    log.InboxRead: Row("Inbox read up to {seq}"),
    runs.RunSubmitted: Row(_submitted),
    runs.RunArrived: Row("Job {job} arrives"),
    runs.AttemptBegan: Row(_placed),
    runs.AttemptLaunched: Row(_launched),
    runs.AttemptRunning: Row("Job {job} runs{warm:if|, {warm} warm}{why_cold:?; started cold: }"),
    runs.AttemptStepped: Row("Job {job} trains"),
    runs.AttemptPaused: Row("Job {job} {held:if|is paused|continues}"),
    runs.AttemptStopping: Row(
        lambda record: f"Job {record.job} is ended, {AFTER[record.next_action]}: {render(record.reason)}", "yellow"
    ),
    runs.AttemptEnded: Row("No process of {job} is left{wait_seconds:if|; it starts again in {wait_seconds:g} s}"),
    runs.AttemptReleased: Row("No process of {job} is left; it continues when it is resumed"),
    runs.ReleaseBegan: Row("Job {job} saves a checkpoint and is then released{operator:? by }{reason:?: }"),
    runs.ReleaseEnded: Row("Job {job} is not released, and continues{reason:?: }", "yellow"),
    runs.RunResumed: Row("Job {job} is resumed{operator:? by }"),
    runs.RunEnded: Row("Job {job} is {phase}{reason:?: }"),
    runs.ResponseBegan: Row("The policy of {job} acts on {incident}{reason:? (|)}: {do:then}", "yellow"),
    runs.ResponseWent: Row("The policy of {job} {left:if|continues: {left:then}|has acted}"),
    requests.JobAnnotated: Row("Note on {job}{operator:? by }{step:? at step }: {text}"),
    requests.ReplicaDrained: Row(
        "{job} {drained:if|is to leave at the end of a step, and to stay away|may come back}{operator:? (|)}"
    ),
    requests.ScheduleSet: Row(_rules),
    scheduling.LoadersAllocated: Row(_allocated),
    requests.NodeDrained: Row(
        "{drained:if|Nothing more is started on {node}|{node} may be used again}{operator:? (|)}"
    ),
}


class Event(NamedTuple):
    """One record with where and when it stands in the log."""

    seq: int
    at: float
    term: int
    record: Record


class Teller:
    """Goes through the log in order; remembers which job an incident, change or order is about, as what follows does
    not repeat it."""

    def __init__(self, job: str | None = None) -> None:
        self.job = job
        self.jobs: set[str] = set()
        """All that the log has named so far."""
        self._jobs_of_id: dict[str, frozenset[str]] = {}
        self._jobs_of_run: dict[str, frozenset[str]] = {}

    def events(self, seq: int, entry: Entry) -> Iterator[Event]:
        """The records of one entry to show: nothing internal, nothing of other jobs if one was asked for."""
        for record in entry.records:
            jobs = self._jobs(record)
            self.jobs |= jobs
            if not isinstance(record, log.InboxRead) and (self.job is None or self.job in jobs):
                yield Event(seq, entry.at, entry.term, record)

    def _jobs(self, record: Record) -> frozenset[str]:
        """Those that the record names; a run also concerns the job that it is a replica of."""
        jobs = named_jobs(record)
        if isinstance(record, runs.RunSubmitted):
            self._jobs_of_run[record.job] = jobs | {record.task.part_of or record.job}
        id = record.change.id if isinstance(record, log.ChangeProposed) else getattr(record, "id", "")
        if id and jobs:
            self._jobs_of_id[id] = jobs
        elif id:
            jobs = self._jobs_of_id.get(id, jobs)
        return frozenset().union(*(self._jobs_of_run.get(job, {job}) for job in jobs))


def lines(event: Event, screen: Screen) -> list[str]:
    """Usually one line; a rank with several devices has one for each."""
    time = screen.paint(stamp(event.at), "dim")
    style = ROWS[type(event.record)].style
    colour = style if isinstance(style, str) else style(event.record)
    return [f"{time}  {screen.paint(clean(text), colour)}" for text in sentences(event.record)]


def as_object(event: Event) -> dict[str, Any]:
    """For `-o json`: the record's own keys after seq, at and term."""
    record: dict[str, Any] = plain(event.record)
    return {"seq": event.seq, "at": event.at, "term": event.term} | record


def sentences(record: Record) -> list[str]:
    row = ROWS[type(record)]
    texts = fill(row.text, asdict(record) | row.more(record)) if isinstance(row.text, str) else row.text(record)
    return [texts] if isinstance(texts, str) else texts
