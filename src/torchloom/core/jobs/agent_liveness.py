"""Agents that send no more beats, and what that means for the runs whose ranks they started.

Ranks may outlive their agent. While the ranks still send beats, the run continues; otherwise the agent is waited for,
and then its node is abandoned.
"""

from __future__ import annotations

from msgspec.structs import replace

from torchloom.core.incident_ids import provisional
from torchloom.core.state.cluster import ClusterState
from torchloom.core.state.incidents import Incident
from torchloom.core.state.ranks import Presence, Rank
from torchloom.core.state.runs import Run
from torchloom.protocol.node import Place, RankStatus
from torchloom.protocol.phrase import Prose, phrase
from torchloom.protocol.records import About, IncidentOpened, Record


def explain_lost_node(cluster: ClusterState, run: Run, now: float) -> Prose:
    """Which node of a run has to be abandoned, if one has."""
    for node in run.nodes:
        if cluster.runtime.node_speaks(node, now) or _alive(cluster, run, node):
            continue
        if _patience_over(cluster, run, node, now):
            return phrase("agent_silent", node=node)
    return ""


def report_silent_agents(cluster: ClusterState, run: Run, now: float) -> list[Record]:
    """Open an incident for each silent agent whose ranks continue."""
    silent = [node for node in run.nodes if not cluster.runtime.node_speaks(node, now) and _alive(cluster, run, node)]
    return [
        IncidentOpened(
            id=provisional("agent", node),
            what=phrase("agent_silent_ranks_go_on", node=node),
            about=_about(node),
            job=run.replica_id.job,
            decision=phrase("agent_waited_for"),
        )
        for node in silent
        if silence_incident(cluster, node) is None
    ]


def silence_incident(cluster: ClusterState, node: str) -> Incident | None:
    """The open incident about a silent agent."""
    about = _about(node)
    return next((i for i in cluster.incidents.values() if i.closed is None and i.about == about), None)


def _about(node: str) -> About:
    return About(node=node, part="agent")


def launcher_gone(cluster: ClusterState, run: Run, now: float) -> bool:
    """Whether the launcher of a run has been away for too long to come back."""
    node = cluster.runtime.nodes.get(run.task.node or "")
    if node is None:
        return not cluster.runtime.node_speaks(run.task.node or "", now)
    return node.beat.leaving or now - node.heard > cluster.settings.node_patience_seconds


def node_abandoned(cluster: ClusterState, run: Run, node: str, now: float) -> bool:
    """Whether its agent is silent and its ranks are gone, or have been waited for long enough."""
    if cluster.runtime.node_speaks(node, now):
        return False
    return _patience_over(cluster, run, node, now) or not _alive(cluster, run, node)


def merge_rank_reports(cluster: ClusterState, run: Run, statuses: tuple[RankStatus, ...]) -> tuple[RankStatus, ...]:
    """What an agent reported before it fell silent, corrected by what its ranks have reported since."""
    ended = finished_ranks(cluster, run)
    return tuple(replace(rank, state="ended", code=0, signal="") if rank.rank in ended else rank for rank in statuses)


def _patience_over(cluster: ClusterState, run: Run, node: str, now: float) -> bool:
    """A silent agent may send beats again, or be restarted and find its ranks, unless its ranks end with it."""
    seen = cluster.runtime.nodes.get(node)
    if seen is None or seen.beat.leaving:
        return True
    if seen.beat.tied and any(at.node == node and _find_rank(cluster, run, at) for at in run.places):
        return True
    return now - seen.heard > cluster.settings.node_patience_seconds


def _find_rank(cluster: ClusterState, run: Run, at: Place) -> Rank | None:
    """The rank at a place of the attempt, once it has joined."""
    return cluster.ranks.find(run.rank(at.rank), at.incarnation)


def _alive(cluster: ClusterState, run: Run, node: str) -> bool:
    """Whether all ranks of a node send beats, or have reported that they finished."""
    for at in run.places:
        rank = _find_rank(cluster, run, at)
        live = rank is not None and rank.presence is Presence.LIVE
        if at.node == node and not live and not _has_finished(rank):
            return False
    return True


def finished_ranks(cluster: ClusterState, run: Run) -> set[int]:
    """Ranks of the attempt that have themselves reported that they finished."""
    return {at.rank for at in run.places if _has_finished(_find_rank(cluster, run, at))}


def _has_finished(rank: Rank | None) -> bool:
    return rank is not None and rank.presence is Presence.LEFT and rank.left == "finished"
