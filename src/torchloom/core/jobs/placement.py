"""Placement: all ranks of a run at once, on nodes that have room, or none."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence

from msgspec.structs import replace

from torchloom.core.decision import NOTHING, Decision
from torchloom.core.jobs import device_groups
from torchloom.core.jobs.arrival import explain_arrival
from torchloom.core.jobs.node_health import request_checks, select_fit
from torchloom.core.jobs.node_room import (
    Room,
    Seat,
    capacity,
    find_failed,
    list_nodes,
    takes_any_number,
    why_unfit,
    why_unusable,
)
from torchloom.core.state.cluster import ClusterState
from torchloom.core.state.run_states import Run
from torchloom.core.state.runtime import NODE_SILENCE
from torchloom.core.torchft.replica_groups import heals, waits_for_lighthouse
from torchloom.protocol.job_spec import Task
from torchloom.protocol.node import Place, Prepare
from torchloom.protocol.phrase import Phrase, Prose, phrase
from torchloom.protocol.run_records import AttemptBegan

LAST_CALL = 30.0
"""Seconds in which a job that may be smaller waits for all of its nodes at first. A next attempt does not wait."""
Seats = Mapping[str, Sequence[Seat]]
"""Of all ranks of a run, by node, in the order of the ranks."""


def place(cluster: ClusterState, run: Run, now: float) -> Decision:
    """Begin an attempt where there is room: on the nodes with the most room, so that few are used."""
    if waits_for_lighthouse(cluster, run) or run.drained or find_preferred(cluster, run, now) is not None:
        return NOTHING
    room = Room(cluster, run)
    chosen = choose(room, now)
    if not chosen:
        return request_checks(cluster, run, _candidates(room, now), now)
    attempt = run.attempt + 1
    places: list[Place] = []
    for node, seats in chosen.items():
        for local, seat in enumerate(seats):
            rank = len(places)
            chance = hashlib.sha256(f"{run.name} {attempt} {rank} {now!r}".encode()).hexdigest()[:12]
            life = f"{int(now * 1000):012x}{chance}"
            places.append(
                Place(rank=rank, local=local, node=node, incarnation=life, device=seat.device, slot=seat.slot)
            )
    record = AttemptBegan(job=run.name, attempt=attempt, places=tuple(places))
    return Decision((record,), tasks=((places[0].node, prepare(cluster, run, attempt)),))


def prepare(cluster: ClusterState, run: Run, attempt: int) -> Prepare:
    task = replace(run.task, checkpoint_dir="") if heals(cluster, run) else run.task
    ordinal = attempt - run.before
    return Prepare.from_fields(run, term=cluster.term, job=run.name, attempt=attempt, task=task, ordinal=ordinal)


def find_preferred(cluster: ClusterState, run: Run, now: float) -> Run | None:
    """The run of a higher priority that gets the room that there is, or is being made. A run keeps the room it has."""
    runs = cluster.runs.by_name.values()
    higher = [other for other in runs if other.waits and other.task.priority > run.task.priority]
    if run.places or not higher:
        return None
    served = {other.makes_room_for for other in runs if other.is_being_released}
    return next((other for other in higher if other.name in served or _fits(cluster, other, now)), None)


def _fits(cluster: ClusterState, run: Run, now: float) -> bool:
    may_start = now >= run.wait_until and not run.drained and not waits_for_lighthouse(cluster, run)
    return may_start and bool(choose(Room(cluster, run), now))


# ── choosing ──


def choose(room: Room, now: float) -> Seats:
    """Where each rank runs: all of them, or fewer if the task allows it; nothing if there is too little room."""
    cluster, run = room.cluster, room.run
    free = _candidates(room, now)
    fit = select_fit(cluster, run, list(free), now)
    if run.task.groups:
        return device_groups.assign(room, _in_order(room, {node: free[node] for node in fit}))
    ranks = _share_out(room, {node: free[node] for node in fit}, now)
    return {node: room.seats(node, count) for node, count in ranks.items()}


def _share_out(room: Room, free: Mapping[str, int], now: float) -> dict[str, int]:
    """The number of ranks for each node, of those that are free there."""
    task, order = room.run.task, _in_order(room, free)
    chosen = [node for node in order if free[node] >= task.per_node][: task.nodes]
    if len(chosen) < task.nodes:
        chosen = order[: task.nodes]
        if len(chosen) < (task.min_nodes or task.nodes) or not _may_be_smaller(room.cluster, room.run, now):
            return {}
    return {node: min(task.per_node, free[node]) for node in chosen}


def _in_order(room: Room, free: Mapping[str, int]) -> list[str]:
    """The nodes with the most room first; of a job that shares, the least loaded ones."""
    shares = room.run.task.share
    return sorted(free, key=lambda node: (room.load(node) if shares else 0.0, -free[node], node))


def _candidates(room: Room, now: float) -> dict[str, int]:
    """Nodes that could take enough ranks of a run, with the number that they could take."""
    cluster, run, task = room.cluster, room.run, room.run.task
    nodes = cluster.runtime.nodes
    there = [node for node in nodes if not nodes[node].beat.tied] if task.node is None else [task.node]
    if run.is_lighthouse and run.places:
        there = [run.places[0].node]
    usable = [node for node in there if why_unusable(cluster, node, now) is None]
    if task.groups:
        return {node: len(room.slots(node)) for node in device_groups.candidates(room, usable)}
    free = {node: room.count(node) for node in usable}
    return {node: ranks for node, ranks in free.items() if ranks >= (task.least or task.per_node)}


def _may_be_smaller(cluster: ClusterState, run: Run, now: float) -> bool:
    """Whether to start with the nodes that are there: others have had time to report."""
    if now < cluster.runtime.blind_until + NODE_SILENCE:  # agents still have to find this weaver
        return False
    return run.attempt > run.before or now >= run.arrived + LAST_CALL


# ── explaining ──


def explain_wait(cluster: ClusterState, run: Run, now: float) -> Prose:
    """Why a run is not started, if it is not."""
    if run.attempt > run.before and now < run.wait_until:
        return phrase("waits_longer", seconds=math.ceil(run.wait_until - now))
    if not run.arrived and (why := explain_arrival(cluster, run, now)):
        return why
    if run.drained:
        return phrase("waits_for_undrain", replica=run.replica_id)
    if waits_for_lighthouse(cluster, run):
        return phrase("waits_for_lighthouse")
    room = Room(cluster, run)
    if choose(room, now):
        preferred = find_preferred(cluster, run, now)
        return "" if preferred is None else phrase("waits_for_priority", job=preferred.name)
    task = run.task
    if task.groups:
        return device_groups.explain_wait(room, now)
    node, ranks = task.node, _span(task.least, task.per_node)
    if node is not None:
        state = phrase("of_node", node=node, text=_describe_room(room, node, now))
        return phrase("waits_for_room_on", ranks=ranks, node=state)
    there = list_nodes(cluster.runtime.nodes, lambda name: _describe_room(room, name, now))
    return phrase("waits_for_nodes", count=_span(task.min_nodes, task.nodes), ranks=ranks, there=there)


def _span(least: int | None, most: int) -> Phrase | int:
    return most if least is None or least == most else phrase("span", least=least, most=most)


def _describe_room(room: Room, node: str, now: float) -> Phrase:
    """The room that a node has for a run, or why it has none."""
    cluster, run = room.cluster, room.run
    if why := why_unusable(cluster, node, now) or why_unfit(cluster, run, node, now):
        return why
    beat = cluster.runtime.nodes[node].beat
    failed = len(find_failed(cluster, beat)) or None
    return phrase("room_free", free=len(room.slots(node)), count=capacity(beat), failed=failed)


def explain_too_large(cluster: ClusterState, task: Task) -> Phrase | None:
    """Why none of the nodes could ever take this task, if none could."""
    if task.groups:
        return device_groups.explain_missing(cluster, task)
    there = {node: seen for node, seen in cluster.runtime.nodes.items() if task.node in {None, node}}
    beats = {node: seen.beat for node, seen in there.items() if not seen.beat.tied}
    least = task.least or task.per_node
    if not beats or any(least <= capacity(beat) or takes_any_number(beat, task) for beat in beats.values()):
        return None
    largest = max(beats, key=lambda node: capacity(beats[node]))
    return phrase("task_too_large", ranks=least, most=capacity(beats[largest]), node=largest)
