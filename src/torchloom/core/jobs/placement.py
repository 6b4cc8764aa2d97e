"""Placement: all ranks of a run at once, on nodes that have room, or none."""

from __future__ import annotations

import hashlib
import math

from msgspec.structs import replace

from torchloom.core.decision import NOTHING, Decision
from torchloom.core.jobs.node_health import is_checked, request_checks, select_fit, unfit_reasons
from torchloom.core.state.cluster import ClusterState
from torchloom.core.state.run_states import Run
from torchloom.core.state.runtime import NODE_SILENCE
from torchloom.core.torchft.replica_groups import heals, waits_for_lighthouse
from torchloom.protocol.job_spec import Task
from torchloom.protocol.node import NodeBeat, Place, Prepare
from torchloom.protocol.phrase import Phrase, Prose, phrase
from torchloom.protocol.run_records import AttemptBegan

CPU = "CPU-"
"""Prefix of the id of a processor."""
NODES_SHOWN = 8
"""Nodes named in the reason why a job waits; the rest is counted."""
LAST_CALL = 30.0
"""Seconds in which a job that may be smaller waits for all of its nodes at first. A next attempt does not wait."""


def place(cluster: ClusterState, run: Run, now: float) -> Decision:
    """Begin an attempt where there is room: on the nodes with the most room, so that few are used."""
    if waits_for_lighthouse(cluster, run) or run.drained:
        return NOTHING
    chosen = _chosen(cluster, run, now)
    if not chosen:
        return request_checks(cluster, run, _free(cluster, run, now), now)
    attempt = run.attempt + 1
    places: list[Place] = []
    for node, ranks in chosen.items():
        devices = [] if run.is_lighthouse else _free_devices(cluster, node, run)
        for local in range(ranks):
            rank = len(places)
            device = devices[local] if local < len(devices) else ""
            chance = hashlib.sha256(f"{run.name} {attempt} {rank} {now!r}".encode()).hexdigest()[:12]
            life = f"{int(now * 1000):012x}{chance}"
            places.append(Place(rank=rank, local=local, node=node, incarnation=life, device=device))
    record = AttemptBegan(job=run.name, attempt=attempt, places=tuple(places))
    return Decision((record,), tasks=((places[0].node, prepare(cluster, run, attempt)),))


def prepare(cluster: ClusterState, run: Run, attempt: int) -> Prepare:
    task = replace(run.task, checkpoint_dir="") if heals(cluster, run) else run.task
    ordinal = attempt - run.before
    return Prepare.from_fields(run, term=cluster.term, job=run.name, attempt=attempt, task=task, ordinal=ordinal)


def explain_wait(cluster: ClusterState, run: Run, now: float) -> Prose:
    """Why a run is not started, if it is not."""
    if run.attempt > run.before and now < run.wait_until:
        return phrase("waits_longer", seconds=math.ceil(run.wait_until - now))
    if run.drained:
        return phrase("waits_for_undrain", replica=run.replica_id)
    if waits_for_lighthouse(cluster, run):
        return phrase("waits_for_lighthouse")
    if _chosen(cluster, run, now):
        return ""
    task = run.task
    node, ranks = task.node, _span(task.least, task.per_node)
    if node is not None:
        state = phrase("of_node", node=node, text=_room(cluster, run, node, now))
        return phrase("waits_for_room_on", ranks=ranks, node=state)
    nodes = sorted(cluster.runtime.nodes)
    shown = [phrase("of_node", node=name, text=_room(cluster, run, name, now)) for name in nodes[:NODES_SHOWN]]
    there = phrase("nodes_there", nodes=shown, more=max(0, len(nodes) - NODES_SHOWN) or None)
    there = there if shown else phrase("no_agent_there")
    return phrase("waits_for_nodes", count=_span(task.min_nodes, task.nodes), ranks=ranks, there=there)


def _span(least: int | None, most: int) -> Phrase | int:
    return most if least is None or least == most else phrase("span", least=least, most=most)


def _room(cluster: ClusterState, run: Run, node: str, now: float) -> Phrase:
    """The room that a node has for a run, or why it has none."""
    if unusable := _why_unusable(cluster, node, now):
        return unusable
    if run.task.check and not is_checked(cluster, run, node, now):
        return phrase("room_being_checked")
    if run.task.check and (why := unfit_reasons(cluster, node)):
        return phrase("room_not_fit", why=why[0])
    beat = cluster.runtime.nodes[node].beat
    free = max(0, _count_room(cluster, node, beat, run.name))
    return phrase("room_free", free=free, count=_capacity(beat), failed=len(_broken(cluster, beat)) or None)


def explain_too_large(cluster: ClusterState, task: Task) -> Phrase | None:
    """Why none of the nodes could ever take this task, if none could."""
    there = {node: seen for node, seen in cluster.runtime.nodes.items() if task.node in {None, node}}
    sizes = {node: _capacity(seen.beat) for node, seen in there.items() if not seen.beat.tied}
    least = task.least or task.per_node
    if not sizes or least <= max(sizes.values()):
        return None
    largest = max(sizes, key=lambda node: sizes[node])
    return phrase("task_too_large", ranks=least, most=sizes[largest], node=largest)


def _chosen(cluster: ClusterState, run: Run, now: float) -> dict[str, int]:
    """The number of ranks for each node: all, or fewer if the task allows it; nothing if there is too little room."""
    task, free = run.task, _free(cluster, run, now)
    order = sorted(select_fit(cluster, run, list(free), now), key=lambda node: (-free[node], node))
    chosen = [node for node in order if free[node] >= task.per_node][: task.nodes]
    if len(chosen) < task.nodes:
        chosen = order[: task.nodes]
        if len(chosen) < (task.min_nodes or task.nodes) or not _may_be_smaller(cluster, run, now):
            return {}
    return {node: min(task.per_node, free[node]) for node in chosen}


def _free(cluster: ClusterState, run: Run, now: float) -> dict[str, int]:
    """Nodes that could take enough ranks of a run, with the number that they could take."""
    task, nodes = run.task, cluster.runtime.nodes
    there = [node for node in nodes if not nodes[node].beat.tied] if task.node is None else [task.node]
    if run.is_lighthouse and run.places:
        there = [run.places[0].node]
    free = {node: _takes(cluster, run, node) for node in there if _why_unusable(cluster, node, now) is None}
    return {node: ranks for node, ranks in free.items() if ranks >= (task.least or task.per_node)}


def _takes(cluster: ClusterState, run: Run, node: str) -> int:
    """The number of ranks of a run that a node could take."""
    beat, wanted = cluster.runtime.nodes[node].beat, run.task.per_node
    if run.is_lighthouse:
        return wanted
    if not beat.tied:
        return _count_room(cluster, node, beat, run.name)
    # It serves the one job that it was started for, and takes all of its ranks, unless one would need a failed device.
    working = len(beat.devices) - len(_broken(cluster, beat))
    shared = wanted > len(beat.devices) and working > 0  # more ranks than devices share those that work
    return wanted if working == len(beat.devices) or wanted <= working or shared else working


def _may_be_smaller(cluster: ClusterState, run: Run, now: float) -> bool:
    """Whether to start with the nodes that are there: others have had time to report."""
    if now < cluster.runtime.blind_until + NODE_SILENCE:  # agents still have to find this weaver
        return False
    return run.attempt > run.before or now >= run.submitted + LAST_CALL


def _why_unusable(cluster: ClusterState, node: str, now: float) -> Phrase | None:
    """Why no ranks may be started on a node, if none may."""
    if node in cluster.runs.drained:
        return phrase("room_drained")
    if node not in cluster.runtime.nodes or not cluster.runtime.node_speaks(node, now):
        return phrase("room_silent")
    if cluster.runtime.leaves(node):
        return phrase("room_leaving")
    return phrase("room_processor_failed") if _processor_failed(cluster, node) else None


def _processor_failed(cluster: ClusterState, node: str) -> bool:
    """Whether the processor of a node was reported failed, and the node has no other device."""
    failed = {device.id for device in cluster.devices.values() if device.failed and device.id.startswith(CPU)}
    if not failed or cluster.runtime.nodes[node].beat.devices:
        return False
    if any(cluster.devices[device].node == node for device in failed):
        return True
    # An agent that serves one job has its own node name: the ranks report which devices they used.
    runs = [run for run in cluster.runs.by_name.values() if not run.over]
    here = [run.rank(place.rank) for run in runs for place in run.places if place.node == node]
    return any(failed.intersection(cluster.ranks[rank].devices) for rank in here if rank in cluster.ranks)


def _capacity(beat: NodeBeat) -> int:
    """The number of ranks that a node takes: one for each device, or, without devices, for each core."""
    return len(beat.devices) or beat.cores


def _count_room(cluster: ClusterState, node: str, beat: NodeBeat, job: str) -> int:
    """The number of further ranks that a node takes on working devices, beside the other jobs."""
    broken = _broken(cluster, beat)
    return _capacity(beat) - len(broken) - sum(place.device not in broken for place in _others(cluster, node, job))


def _free_devices(cluster: ClusterState, node: str, run: Run) -> list[str]:
    """Those that work and that no other job has, nor another replica.

    An agent that serves one job alone leaves the choice to the script, as long as there is no failed one to choose.
    """
    beat = cluster.runtime.nodes[node].beat
    broken = _broken(cluster, beat)
    if beat.tied and not broken and run.task.torchft is None:
        return []
    taken = {place.device for place in _others(cluster, node, run.name)} | broken
    return [device for device in beat.devices if device not in taken]


def _broken(cluster: ClusterState, beat: NodeBeat) -> set[str]:
    """The failed devices of a node: nothing is started on them until they work again."""
    devices = (cluster.devices.get(device) for device in beat.devices)
    return {device.id for device in devices if device is not None and device.failed}


def _others(cluster: ClusterState, node: str, job: str) -> list[Place]:
    runs = [run for run in cluster.runs.by_name.values() if not run.over and not run.is_lighthouse and run.name != job]
    return [place for run in runs for place in run.places if place.node == node]
