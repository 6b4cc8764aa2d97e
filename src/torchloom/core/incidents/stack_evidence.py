"""What an incident keeps of where the ranks of a job were when they were looked at."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from torchloom.core.detect.stack_groups import describe_groups, group_stacks
from torchloom.core.state.cluster import ClusterState
from torchloom.core.state.incident_history import Incident
from torchloom.protocol.facts import Inspected, RankStacks
from torchloom.protocol.ids import RankId, ReplicaId
from torchloom.protocol.node import Reading
from torchloom.protocol.phrase import Phrase, Prose, phrase
from torchloom.protocol.rank import Beat

MOST = 4
"""Ranks of which more is shown than where they were."""


def of_agent(report: Inspected, incident: Incident) -> tuple[Prose, ...]:
    """What an agent has seen of its ranks and of its machine."""
    texts = {rank.rank: rank.text for rank in report.ranks if rank.text}
    culprits = culprits_of(incident)
    lines = [*describe_groups(group_stacks(texts), culprits), *_how(report.ranks)]
    quoted = [rank for rank in report.ranks if rank.said and (rank.rank in culprits or not culprits)][:MOST]
    last = [phrase("last_of_stderr", rank=rank.rank, lines=rank.said.splitlines()) for rank in quoted]
    host = [phrase("of_node", node=report.node, text=report.host)] if report.host else []
    return phrase("stacks", node=report.node, lines=lines), *last, *host


def of_ranks(texts: Mapping[RankId, str], incident: Incident) -> Phrase:
    """What ranks have shown themselves."""
    by_number = {rank.rank: text for rank, text in texts.items() if text}
    return phrase("stacks", node="", lines=describe_groups(group_stacks(by_number), culprits_of(incident)))


def last_heard(cluster: ClusterState, of: ReplicaId, culprits: Collection[int], now: float) -> tuple[Prose, ...]:
    """The last beats of those to blame and of one that is not, and what their devices say of themselves."""
    ranks = sorted(cluster.ranks.ids_of(of.job), key=lambda rank: (rank.replica_id != of, rank))
    blamed = [rank for rank in ranks if rank.replica_id == of and rank.rank in culprits][:MOST]
    peer = [rank for rank in ranks if rank not in blamed][:1]
    lines = []
    for rank in (*blamed, *peer):
        rank_runtime = cluster.runtime.ranks.get(rank)
        if rank_runtime is not None and rank_runtime.beat is not None:
            name = rank.rank if rank.replica_id == of else rank
            lines.append(phrase("last_heard", rank=name, ago=now - rank_runtime.heard, parts=_beat(rank_runtime.beat)))
    devices = {device for rank in blamed for device in cluster.ranks[rank].devices}
    readings = [r for seen in cluster.runtime.nodes.values() for r in seen.beat.readings if r.device in devices]
    return (*lines, *map(_reading, readings))


def _beat(beat: Beat) -> list[Phrase]:
    parts = [phrase("beat_step", step=beat.step)]
    if beat.phase:
        parts.append(phrase("beat_phase", phase=beat.phase))
    if beat.times is not None:
        parts.append(phrase("beat_time", ms=1000 * beat.times.p50))
    if beat.loss is not None:
        parts.append(phrase("beat_loss", loss=beat.loss))
    parts.append(phrase("beat_memory", mb=beat.rss_mb))
    return parts


def _reading(reading: Reading) -> Phrase:
    values = (
        (reading.utilisation, phrase("reading_utilisation", percent=reading.utilisation)),
        (reading.memory_mb, phrase("reading_memory", mb=reading.memory_mb)),
        (reading.temperature, phrase("reading_temperature", celsius=reading.temperature)),
        (reading.power_watts, phrase("reading_power", watts=reading.power_watts)),
        (reading.throttled or None, phrase("reading_throttled", why=reading.throttled)),
    )
    parts = [part for value, part in values if value is not None]
    return phrase("device_reading", device=reading.device, parts=parts)


def culprits_of(incident: Incident) -> tuple[int, ...]:
    """The rank that it is about."""
    return () if incident.about.rank is None else (incident.about.rank.rank,)


def _how(ranks: Iterable[RankStacks]) -> list[Phrase]:
    lines = []
    for rank in ranks:
        if rank.how == "signal":
            lines.append(phrase("stacks_by_signal", rank=rank.rank, state=rank.state))
        elif rank.how == "py-spy":
            lines.append(phrase("stacks_from_outside", rank=rank.rank, state=rank.state))
        elif rank.how == "none":
            lines.append(phrase("of_rank", rank=rank.rank, what=rank.state))
    return lines
