"""The cluster state as a viewer sees it."""

from __future__ import annotations

from collections import Counter
from enum import Enum
from typing import Any, TypeVar

import msgspec
from msgspec.structs import asdict, replace

from torchloom.core.jobs.placement import explain_wait
from torchloom.core.state.change_ledger import Change, ChangePhase
from torchloom.core.state.cluster import ClusterState, Job
from torchloom.core.state.device_map import Device
from torchloom.core.state.incident_history import DECIDED, Incident
from torchloom.core.state.rank_states import PRESENT, JobPhase, Presence, Rank
from torchloom.core.state.run_states import Run, RunPhase
from torchloom.core.state.runtime import NODE_SILENCE
from torchloom.protocol import views
from torchloom.protocol.ids import RankId
from torchloom.protocol.node import NodeBeat, RankStatus, Reading
from torchloom.protocol.phrase import Phrase, phrase
from torchloom.protocol.rank import Value
from torchloom.views.records import sentences
from torchloom.views.wording.phrases import render, render_all, shorten

View = TypeVar("View", bound=msgspec.Struct)
CLOSED_SHOWN = 50
"""Closed incidents in a picture; the log has all."""
INCIDENTS_SHOWN = 200
EVIDENCE_SHOWN = 200_000
"""Characters of their evidence and history; beyond, the older ones are shortened."""
SHORT = 200
CHANGES_SHOWN = 100
UNUSED_SHOWN = 1000
"""Devices in a picture that no rank has."""
READINGS_SHOWN = 2000
"""Readings in a picture of all nodes; where there are more, none is: it has to fit one message."""


def picture(cluster: ClusterState, plane: views.PlaneView, look: views.QueryCluster) -> views.ClusterView:
    """Ranks, devices and assignments in pages, since the whole is too large for a message; the rest on the first."""
    ranks = cluster.ranks.sorted_ids() if look.job is None else sorted(cluster.ranks.ids_of(look.job))
    page = ranks[look.offset : look.offset + look.limit]
    first = look.offset == 0
    idle = _idle(cluster) if first else {}
    by_hand = cluster.drmap.registered()[:UNUSED_SHOWN] if first else []
    assignments = [*(seat for rank in page for seat in cluster.drmap.assignments_of(rank)), *by_hand]
    devices = {device for rank in page for device in cluster.ranks[rank].devices}
    devices.update(assignment.device for assignment in assignments)
    if first:
        devices |= _unused(cluster, idle)
    readings = _readings(cluster, plane.now) if look.readings else {}
    listed = [device for name in sorted(devices) if (device := cluster.devices.get(name) or idle.get(name))]
    jobs = [job for name, job in sorted(cluster.jobs.items()) if first and look.job in {None, name}]
    return views.ClusterView(
        plane=plane,
        jobs=tuple(_job(cluster, job, marks=look.job is not None) for job in jobs),
        ranks=tuple(_rank(cluster, cluster.ranks[rank]) for rank in page),
        total_ranks=len(ranks),
        devices=tuple(_device(cluster, device, readings.get(device.id)) for device in listed),
        assignments=tuple(assignments),
        incidents=_incidents(cluster, look) if first else (),
    )


def _view(kind: type[View], state: object, **more: object) -> View:
    """A view of a part of the state: its fields of the same names, with phrases as text, and what else is given."""
    fields = {name: _shown(getattr(state, name)) for name in kind.__struct_fields__ if hasattr(state, name)}
    return kind(**(fields | more))


def _shown(value: Any) -> Any:
    if isinstance(value, Phrase):
        return render(value)
    return value.value if isinstance(value, Enum) else value


def readable(beat: NodeBeat) -> NodeBeat:
    """The beat of an agent as people read it, with sentences instead of phrases."""
    fitness = beat.fitness and replace(beat.fitness, unfit=render_all(beat.fitness.unfit))
    attempts = tuple(replace(attempt, ranks=tuple(map(_readable_rank, attempt.ranks))) for attempt in beat.attempts)
    return replace(beat, fitness=fitness, attempts=attempts)


def _readable_rank(rank: RankStatus) -> RankStatus:
    if not (rank.evidence or rank.why_cold):
        return rank
    return replace(rank, evidence=render(rank.evidence), error=render(rank.error), why_cold=render(rank.why_cold))


def _readings(cluster: ClusterState, now: float) -> dict[str, Reading]:
    """The readings of devices that agents have reported recently."""
    speaking = (seen.beat for seen in cluster.runtime.nodes.values() if now - seen.heard < NODE_SILENCE)
    return {reading.device: reading for beat in speaking for reading in beat.readings}


def _idle(cluster: ClusterState) -> dict[str, Device]:
    """Devices that are known only because an agent says that its node has them."""
    listed = {device: node for node, seen in cluster.runtime.nodes.items() for device in seen.beat.devices}
    return {device: Device(id=device, node=node) for device, node in listed.items() if device not in cluster.devices}


def _unused(cluster: ClusterState, idle: dict[str, Device]) -> set[str]:
    """Devices that no rank we know of has: failed ones first, for they matter most."""
    used = {device for rank in cluster.ranks.values() for device in rank.devices}
    unused = [device for device in (*cluster.devices.values(), *idle.values()) if device.id not in used]
    return {device.id for device in sorted(unused, key=lambda d: (not d.failed, d.id))[:UNUSED_SHOWN]}


def _incidents(cluster: ClusterState, look: views.QueryCluster) -> tuple[views.IncidentView, ...]:
    """Newest first; of one job also those of no job. The newest are complete, the others shortened."""
    if look.incident is not None:
        named = cluster.incidents.get(look.incident)
        return (_incident(named),) if named is not None else ()
    wanted = [i for i in cluster.incidents.values() if look.job is None or i.job in {"", look.job}]
    closed = [i for i in wanted if i.closed is not None][-CLOSED_SHOWN:]
    shown = [i for i in wanted if i.closed is None] + closed
    incident_views = []
    room = EVIDENCE_SHOWN
    for incident in sorted(shown, key=lambda incident: -incident.opened)[:INCIDENTS_SHOWN]:
        view = _incident(incident)
        room -= sum(map(len, view.evidence)) + sum(len(text) for _, text in view.history)
        if room < 0:
            view = replace(view, evidence=tuple(text[:SHORT] for text in view.evidence[:3]), history=())
        incident_views.append(view)
    return tuple(incident_views)


def _incident(incident: Incident) -> views.IncidentView:
    decided = phrase(DECIDED, decision=incident.decision)
    return _view(
        views.IncidentView,
        incident,
        evidence=render_all(incident.evidence),
        short=render(shorten(incident.what)),
        brief=render(shorten(incident.decision)),
        decided=next((at for at, entry in incident.history if entry == decided), None),
        history=tuple((at, render(shorten(entry))) for at, entry in incident.history if entry != decided),
        stopped=incident.stopped[0] if incident.stopped is not None else "",
    )


def _device(cluster: ClusterState, device: Device, reading: Reading | None) -> views.DeviceView:
    health = "failed" if device.failed else "ok"
    replicas = cluster.drmap.replicas_on(device.id)
    return _view(views.DeviceView, device, device=device.id, health=health, replicas=replicas, reading=reading)


def _rank(cluster: ClusterState, rank: Rank) -> views.RankView:
    rank_runtime = cluster.runtime.ranks[rank.id]
    return _view(
        views.RankView,
        rank,
        rank=rank.id,
        heard=rank_runtime.heard if rank_runtime.beat else None,
        beat=rank_runtime.beat,
        evicted=cluster.is_evicted(rank),
        drained=(run := cluster.runs.of(rank.id.replica_id)) is not None and run.drained,
    )


def _job(cluster: ClusterState, job: Job, marks: bool) -> views.JobView:
    members = cluster.ranks.of_job(job.name)
    live = [rank for rank in members if rank.presence is Presence.LIVE and not cluster.is_evicted(rank)]
    beats = cluster.reporting_beats(job.name)
    rates = [beat.samples_per_second for beat in beats if beat.samples_per_second is not None]
    runs = [run for run in cluster.runs.of_job(job.name) if not run.is_lighthouse]
    none_runs = bool(runs) and all(run.phase is not RunPhase.RUNNING for run in runs)
    phase = runs[0].phase if none_runs else job.phase
    count = sum(run.world_size for run in runs) or len(members)
    began = max((run.since for run in runs), default=0.0)
    over = sum(rank.presence not in PRESENT and rank.since >= began for rank in members)
    return _view(
        views.JobView,
        job,
        job=job.name,
        phase="ending" if phase is JobPhase.RUNNING and over >= count > 0 else phase.value,
        ranks=count,
        live=len(live),
        step=cluster.step_of(job.name),
        loss=cluster.loss_of(job.name),
        samples_per_second=sum(rates) if rates and job.phase is JobPhase.RUNNING else None,
        paused=bool(live) and any(beat.paused for beat in beats),
        marks=tuple(
            views.MarkView(at=at, text=" ".join(sentences(record)), record=record)
            for at, record in (cluster.marks.get(job.name, ()) if marks else ())
        ),
    )


def knobs(cluster: ClusterState, look: views.QueryKnobs) -> views.KnobsView:
    in_force: dict[str, Value] = {}
    by_replica: dict[str, dict[str, Value]] = {}
    newest = 0
    speakers: dict[str, RankId] = {}
    """By knob, the rank whose value is shown."""
    for rank in sorted(cluster.ranks.ids_of(look.job), reverse=True):
        rank_runtime = cluster.runtime.ranks[rank]
        beat = rank_runtime.beat
        if beat is not None and beat.knobs and not rank_runtime.over:
            in_force, newest = in_force | beat.knobs, beat.change
            by_replica[rank.replica] = beat.knobs
            speakers |= dict.fromkeys(beat.knobs, rank)
    knob_views = []
    for name, knob in cluster.ledger.knobs.get(look.job, {}).items():
        change = cluster.ledger.changes.get(knob.change)
        newer = (
            change is not None
            and change.phase is ChangePhase.SETTLED
            and change.change.number > newest  # than the last beat
            and change.target == look.job  # it is the value of the whole job
        )
        value = knob.value if newer else in_force.get(name, knob.value)
        speaker = speakers.get(name)
        if speaker is not None and not newer:
            change = cluster.ledger.giver(look.job, speaker.replica, speaker.rank, name)
        others = {} if newer or knob.spec.per == "rank" else by_replica
        elsewhere = {r: values[name] for r, values in sorted(others.items()) if values.get(name, value) != value}
        who, when = (change.operator, change.asked) if change else ("", None)
        view = views.KnobView.from_fields(knob, value=value, elsewhere=elsewhere, changed_by=who, changed=when)
        knob_views.append(replace(view, change=change.id if change else ""))
    latest = list(cluster.ledger.of_job(look.job))[: -CHANGES_SHOWN - 1 : -1]
    return views.KnobsView(knobs=tuple(knob_views), changes=tuple(_change(cluster, change) for change in latest))


def _change(cluster: ClusterState, change: Change) -> views.ChangeView:
    """Without the key of its verdict."""
    overwrites = () if change.reverted_by else cluster.ledger.overwritten_by_revert(change)
    return _view(
        views.ChangeView,
        change,
        **asdict(change.change) | {"key": None},
        ranks=len(change.lives),
        overwrites=overwrites,
    )


def curves(cluster: ClusterState, look: views.QueryCurves) -> views.CurvesView:
    ranks = sorted(r for r in cluster.ranks.ids_of(look.job) if look.replica in {None, r.replica})
    page = ranks[look.offset : look.offset + look.limit]
    pairs = ((rank, cluster.runtime.ranks[rank].curve) for rank in page)
    points = tuple((rank, curve.points if curve else ()) for rank, curve in pairs)
    return views.CurvesView(curves=points, total=len(ranks))


_WAITING = {RunPhase.SUBMITTED, RunPhase.RESTARTING}


def runs(cluster: ClusterState, look: views.QueryRuns, now: float) -> views.RunsView:
    by_name = cluster.runs.by_name
    wanted = cluster.runs.named(look.job) if look.job is not None else [by_name[job] for job in sorted(by_name)]
    placed = [run for run in by_name.values() if not run.over and run.phase not in _WAITING]
    used = Counter(place.node for run in placed for place in run.places)
    many = sum(len(seen.beat.readings) for seen in cluster.runtime.nodes.values()) > READINGS_SHOWN
    return views.RunsView(
        runs=tuple(
            _view(
                views.RunView,
                run,
                job=run.name,
                attempt=run.ordinal,
                step=max(run.step, cluster.furthest(run)),
                **_waiting(cluster, run, now),
                notes=tuple(
                    replace(note, reason=render(note.reason), why_cold=render(note.why_cold)) for note in run.notes
                ),
                goodput=cluster.goodput.of(run.name, now, _step(cluster, run)),
            )
            for run in wanted
        ),
        nodes=tuple(
            views.NodeView(
                node=node,
                beat=readable(replace(seen.beat, readings=()) if many else seen.beat),
                heard=seen.heard,
                drained=node in cluster.runs.drained,
                used=used[node],
            )
            for node, seen in sorted(cluster.runtime.nodes.items())
        ),
    )


def _waiting(cluster: ClusterState, run: Run, now: float) -> dict[str, str]:
    """What a run waits for, if it waits, for people and for programs."""
    why = explain_wait(cluster, run, now) if run.phase in _WAITING else ""
    return {"waiting": render(why), "waiting_code": why.code if isinstance(why, Phrase) else ""}


def _step(cluster: ClusterState, run: Run) -> int | None:
    """How far the attempt under way is, if one of its ranks has said so since this weaver began, or none has joined."""
    runtimes = (cluster.runtime.ranks.get(run.rank(place.rank)) for place in run.places)
    reported = any(rank_runtime is not None and rank_runtime.beat is not None for rank_runtime in runtimes)
    account = cluster.goodput.get(run.name)
    return cluster.furthest(run) if reported or (account is not None and not account.joined) else None
