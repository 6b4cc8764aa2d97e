"""What an incident keeps of where the ranks of a job were when they were looked at."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from torchloom.core.detect.odd import group, story
from torchloom.core.fabric import Fabric
from torchloom.core.incidents import Incident
from torchloom.messages import Beat, Inspected, RankId, RankStacks, Reading, ReplicaId

STACKS = "where the ranks were"
"""How that part of the evidence begins."""
MOST = 4
"""Ranks of which more is told than where they were."""
FOR_INCIDENT = "incident-"
"""How the request of an order begins by which ranks show their stacks for an incident."""


def head(node: str) -> str:
    return f"{STACKS} on {node}:"


def seen_on(incident: Incident, node: str) -> bool:
    """Whether the agent on this node has told what it saw."""
    return any(evidence.startswith(head(node)) for evidence in incident.evidence)


def of_agent(said: Inspected, incident: Incident) -> tuple[str, ...]:
    """What an agent has seen of its ranks and of its machine."""
    texts = {rank.rank: rank.text for rank in said.ranks if rank.text}
    culprits = culprits_of(incident)
    lines = [*story(group(texts), culprits), *_how(said.ranks)]
    told = [rank for rank in said.ranks if rank.said and (rank.rank in culprits or not culprits)][:MOST]
    last = [_text(f"the last that rank {rank.rank} wrote to stderr:", rank.said.splitlines()) for rank in told]
    return _text(head(said.node), lines), *last, *([f"{said.node}: {said.host}"] if said.host else [])


def of_ranks(texts: Mapping[RankId, str], incident: Incident) -> str:
    """What ranks have shown themselves."""
    by_number = {rank.rank: text for rank, text in texts.items() if text}
    return _text(f"{STACKS}:", story(group(by_number), culprits_of(incident)))


def last_heard(fabric: Fabric, of: ReplicaId, culprits: Collection[int], now: float) -> tuple[str, ...]:
    """The last beats of those to blame and of one that is not, and what their devices say of themselves."""
    ranks = sorted(fabric.ranks_of_job.get(of.job, ()), key=lambda rank: (rank.of != of, rank))
    blamed = [rank for rank in ranks if rank.of == of and rank.rank in culprits][:MOST]
    peer = [rank for rank in ranks if rank not in blamed][:1]
    lines = []
    for rank in (*blamed, *peer):
        pulse = fabric.watch.pulses.get(rank)
        if pulse is not None and pulse.beat is not None:
            name = rank.rank if rank.of == of else rank
            lines.append(f"rank {name} was last heard {now - pulse.heard:.1f} s ago, {_beat(pulse.beat)}")
    devices = {device for rank in blamed for device in fabric.ranks[rank].devices}
    readings = [r for seen in fabric.watch.nodes.values() for r in seen.beat.readings if r.device in devices]
    return (*lines, *map(_reading, readings))


def _beat(beat: Beat) -> str:
    parts = [f"at step {beat.step}"]
    if beat.phase:
        parts.append(f"in {beat.phase}")
    if beat.times is not None:
        parts.append(f"{1000 * beat.times.p50:.3g} ms a step")
    if beat.loss is not None:
        parts.append(f"loss {beat.loss:.4g}")
    parts.append(f"{beat.rss_mb:,.0f} MB")
    return ", ".join(parts)


def _reading(reading: Reading) -> str:
    known = {
        "utilisation": (reading.utilisation, "%"),
        "memory": (reading.memory_mb, "MB"),
        "temperature": (reading.temperature, "°C"),
        "power": (reading.power_watts, "W"),
    }
    parts = [f"{name} {value:.0f} {unit}" for name, (value, unit) in known.items() if value is not None]
    throttled = [f"throttled: {reading.throttled}"] if reading.throttled else []
    return f"device {reading.device}: {', '.join(parts + throttled) or 'no reading'}"


def culprits_of(incident: Incident) -> tuple[int, ...]:
    """Whom its subject names."""
    last = incident.subject.partition("#")[0].rpartition("/")[2]
    return (int(last),) if last.isdecimal() else ()


def _how(ranks: Iterable[RankStacks]) -> list[str]:
    lines = []
    for rank in ranks:
        if rank.how == "signal":
            lines.append(f"rank {rank.rank}: {rank.state}; its interpreter was held, a signal made it show its stacks")
        elif rank.how == "py-spy":
            lines.append(f"rank {rank.rank}: {rank.state}; its stacks were read from outside")
        elif rank.how == "none":
            lines.append(f"rank {rank.rank}: {rank.state}")
    return lines


def _text(first: str, lines: Iterable[str]) -> str:
    return "\n".join((first, *(f"  {line}" for line in lines)))
