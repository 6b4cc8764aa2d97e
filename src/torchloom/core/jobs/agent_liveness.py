"""Agents that are no longer heard, and what that means for the runs they have ranks of.

Ranks may outlive their agent. As long as they are heard themselves all is well; else the agent is waited for, and then
its node is given up.
"""

from __future__ import annotations

from msgspec.structs import replace

from torchloom.core.incident_ids import provisional
from torchloom.core.state.cluster import ClusterState
from torchloom.core.state.incidents import Incident
from torchloom.core.state.presence import Presence
from torchloom.core.state.runs import Run
from torchloom.protocol.incident_records import About, IncidentOpened
from torchloom.protocol.node import Place, RankStatus
from torchloom.protocol.phrase import Prose, phrase
from torchloom.protocol.records import Record


def explain_lost_node(cluster: ClusterState, run: Run, now: float) -> Prose:
    """A node that has to be given up. Ranks may outlive their agent: as long as they are heard, all is well."""
    for node in run.nodes:
        if cluster.runtime.node_speaks(node, now) or _alive(cluster, run, node):
            continue
        if _patience_over(cluster, run, node, now):
            return phrase("agent_silent", node=node)
    return ""


def report_silent_agents(cluster: ClusterState, run: Run, now: float) -> list[Record]:
    """Agents that are missed while their ranks go on."""
    away = [node for node in run.nodes if not cluster.runtime.node_speaks(node, now) and _alive(cluster, run, node)]
    untold = [node for node in away if silence_incident(cluster, node) is None]
    return [
        IncidentOpened(
            id=provisional("agent", node),
            what=phrase("agent_silent_ranks_go_on", node=node),
            about=_about(node),
            job=run.replica_id.job,
            decision=phrase("agent_waited_for"),
        )
        for node in untold
    ]


def silence_incident(cluster: ClusterState, node: str) -> Incident | None:
    """The open incident that tells of its silence."""
    about = _about(node)
    return next((i for i in cluster.incidents.values() if i.closed is None and i.about == about), None)


def _about(node: str) -> About:
    return About(node=node, part="agent")


def launcher_gone(cluster: ClusterState, run: Run, now: float) -> bool:
    """Its launcher has been away for too long to come back."""
    seen = cluster.runtime.nodes.get(run.task.node or "")
    if seen is None:
        return not cluster.runtime.node_speaks(run.task.node or "", now)
    return seen.beat.leaving or now - seen.heard > cluster.settings.node_patience_seconds


def node_abandoned(cluster: ClusterState, run: Run, node: str, now: float) -> bool:
    """Nobody answers there, and if a rank still runs, it has been waited for long enough."""
    if cluster.runtime.node_speaks(node, now):
        return False
    return _patience_over(cluster, run, node, now) or not _alive(cluster, run, node)


def merge_rank_reports(cluster: ClusterState, run: Run, told: tuple[RankStatus, ...]) -> tuple[RankStatus, ...]:
    """What an agent said before it fell silent, with what its ranks have said since."""
    ended = {rank.rank for rank in told if has_finished(cluster, run, rank.rank)}
    return tuple(replace(rank, state="ended", code=0, signal="") if rank.rank in ended else rank for rank in told)


def _patience_over(cluster: ClusterState, run: Run, node: str, now: float) -> bool:
    """A silent agent may speak again, or be started anew and find its ranks; not one whose ranks ended with it."""
    seen = cluster.runtime.nodes.get(node)
    if seen is None or seen.beat.leaving:
        return True
    if seen.beat.tied and any(at.node == node and _was_heard(cluster, run, at) for at in run.places):
        return True
    return now - seen.heard > cluster.settings.node_patience_seconds


def _was_heard(cluster: ClusterState, run: Run, at: Place) -> bool:
    known = cluster.ranks.get(run.rank(at.rank))
    return known is not None and known.incarnation == at.incarnation


def _alive(cluster: ClusterState, run: Run, node: str) -> bool:
    """Whether all ranks of a node are heard themselves, or have said that they finished."""
    for at in run.places:
        known = cluster.ranks.get(run.rank(at.rank))
        lives = known is not None and known.incarnation == at.incarnation and known.presence is Presence.LIVE
        if at.node == node and not lives and not has_finished(cluster, run, at.rank):
            return False
    return True


def has_finished(cluster: ClusterState, run: Run, number: int) -> bool:
    """Whether a rank of the attempt has said so itself."""
    known = cluster.ranks.get(run.rank(number))
    this = any(at.rank == number and known is not None and at.incarnation == known.incarnation for at in run.places)
    return this and known is not None and known.presence is Presence.LEFT and known.left == "finished"
