"""Where the ranks of a run go: all of them at once, on nodes that have room, or none."""

from __future__ import annotations

import hashlib

from torchloom.core.decision import NOTHING, Decision
from torchloom.core.fabric import Fabric
from torchloom.core.runs import Run
from torchloom.messages import AttemptBegan, NodeBeat, Place, Prepare, Task


def place(fabric: Fabric, run: Run, now: float) -> Decision:
    """Begin an attempt where there is room. The nodes with most of it come first, so that few have to be used."""
    chosen = _chosen(fabric, run, now)
    if len(chosen) < run.task.nodes:
        return NOTHING
    attempt, wanted = run.attempt + 1, run.task.per_node
    places = []
    for at, node in enumerate(chosen):
        devices = free_devices(fabric, node, run.job)
        for local in range(wanted):
            rank = at * wanted + local
            device = devices[local] if local < len(devices) else ""
            life = _life(run.job, attempt, rank, now)
            places.append(Place(rank=rank, local=local, node=node, incarnation=life, device=device))
    record = AttemptBegan(job=run.job, attempt=attempt, places=tuple(places), reason=run.reason)
    return Decision(
        (record,),
        tasks=((chosen[0], _prepare(fabric, run, attempt)),),
        reason=f"{run.job}: attempt {attempt - run.before} on {', '.join(chosen)}",
    )


def prepare(fabric: Fabric, run: Run) -> Prepare:
    """For the attempt under way."""
    return _prepare(fabric, run, run.attempt)


def _prepare(fabric: Fabric, run: Run, attempt: int) -> Prepare:
    return Prepare(
        term=fabric.term,
        job=run.job,
        attempt=attempt,
        task=run.task,
        ordinal=attempt - run.before,
        submitted=run.submitted,
    )


def waits_for(fabric: Fabric, run: Run, now: float) -> str:
    """Why a run is not started, if it is not."""
    if run.attempt > run.before and now < run.wait_until:
        return f"{run.wait_until - now:.0f} s more, after a failure without a step forward"
    have = len(_chosen(fabric, run, now))
    if have >= run.task.nodes:
        return ""
    node = run.task.node
    if node is not None:
        known = node in fabric.watch.nodes
        return f"room for {run.task.per_node} on {_told(fabric, node, run.job, now) if known else f'{node}: silent'}"
    told = [_told(fabric, name, run.job, now) for name in sorted(fabric.watch.nodes)]
    there = "; ".join(told[:8]) + (f"; and {len(told) - 8} more" if len(told) > 8 else "")
    wanted = "a node" if run.task.nodes == 1 else f"{run.task.nodes} nodes"
    return f"{wanted} with room for {run.task.per_node} ({there or 'there is no agent'})"


def _told(fabric: Fabric, node: str, job: str, now: float) -> str:
    if node in fabric.runs.drained:
        return f"{node}: drained"
    if not fabric.watch.node_speaks(node, now):
        return f"{node}: silent"
    beat = fabric.watch.nodes[node].beat
    if beat.leaving:
        return f"{node}: leaving"
    return f"{node}: {max(0, room(fabric, node, beat, job))} of {capacity(beat)} free"


def too_large(fabric: Fabric, task: Task) -> str:
    """Why no node that is known could ever take this, or nothing."""
    there = {node: seen for node, seen in fabric.watch.nodes.items() if task.node in {None, node}}
    sizes = {node: capacity(seen.beat) for node, seen in there.items() if not seen.beat.tied}
    if not sizes or task.per_node <= max(sizes.values()):
        return ""
    largest = max(sizes, key=lambda node: sizes[node])
    return f"{task.per_node} ranks on a node, and none takes more than {sizes[largest]} ({largest})"


def _chosen(fabric: Fabric, run: Run, now: float) -> list[str]:
    usable = [node for node in fabric.watch.nodes if _usable(fabric, node, now)]
    if run.task.node is not None:
        node = run.task.node
        if node not in usable:
            return []
        beat = fabric.watch.nodes[node].beat
        return [node] if beat.tied or room(fabric, node, beat, run.job) >= run.task.per_node else []
    free = {
        node: room(fabric, node, fabric.watch.nodes[node].beat, run.job)
        for node in usable
        if not fabric.watch.nodes[node].beat.tied  # it serves the one who started it
    }
    fitting = [node for node in free if free[node] >= run.task.per_node]
    return sorted(fitting, key=lambda node: (-free[node], node))[: run.task.nodes]


def _usable(fabric: Fabric, node: str, now: float) -> bool:
    if node in fabric.runs.drained or fabric.watch.leaves(node):
        return False
    return fabric.watch.node_speaks(node, now)


def capacity(beat: NodeBeat) -> int:
    """How many ranks a node takes: one for each device, or, without any, for each core."""
    return len(beat.devices) or beat.cores


def room(fabric: Fabric, node: str, beat: NodeBeat, job: str) -> int:
    """How many more, beside the other jobs."""
    return capacity(beat) - sum(1 for place in _others(fabric, node, job))


def free_devices(fabric: Fabric, node: str, job: str) -> list[str]:
    """Those that no other job has. An agent that serves one job alone leaves the choice to the script."""
    beat = fabric.watch.nodes[node].beat
    taken = {place.device for place in _others(fabric, node, job)}
    return [] if beat.tied else [device for device in beat.devices if device not in taken]


def _others(fabric: Fabric, node: str, job: str) -> list[Place]:
    runs = [run for run in fabric.runs.by_job.values() if not run.over and run.job != job]
    return [place for run in runs for place in run.places if place.node == node]


def _life(job: str, attempt: int, rank: int, now: float) -> str:
    chance = hashlib.sha256(f"{job} {attempt} {rank} {now!r}".encode()).hexdigest()[:12]
    return f"{int(now * 1000):012x}{chance}"
