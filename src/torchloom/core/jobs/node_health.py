"""Whether runs can rely on a node: its agent sends beats, its ranks live, and, for a job with `check`, it is fit.

Ranks may outlive their agent. While the ranks still send beats, the run continues; otherwise the agent is waited for,
and then its node is abandoned.

Agents check their nodes when a job with `check` is to be placed, and the speed of nodes is compared. A result is valid
for a while; a node that was not fit is checked again sooner, because an operator may have repaired it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from statistics import median

from msgspec.structs import replace

from torchloom.core.decision import NOTHING, Decision, close_incident, provisional
from torchloom.core.state.cluster import ClusterState
from torchloom.core.state.incident_history import Incident
from torchloom.core.state.rank_states import Presence, Rank
from torchloom.core.state.run_states import Run
from torchloom.protocol.node import Examine, RankStatus
from torchloom.protocol.phrase import Phrase, Prose, phrase
from torchloom.protocol.records import About, IncidentOpened, Record

FRESH_SECONDS = 600.0
"""How long the result of a check is valid."""
AGAIN_SECONDS = 60.0
"""The same for a node that was not fit."""
PATIENCE_SECONDS = 120.0
"""How long a job waits for results; then it uses the nodes that have one."""
SLOW = 2.0
"""A node that takes this many times as long as the median of its peers is not fit."""
PEERS = 3
"""The least number of nodes to compare, itself included."""


# ── agents ──


def explain_lost_node(cluster: ClusterState, run: Run, now: float) -> Prose:
    """Which node of a run has to be abandoned, if one has."""
    for node in run.nodes:
        speaks = cluster.runtime.node_speaks(node, now)
        if not speaks and not _alive(cluster, run, node) and _patience_over(cluster, run, node, now):
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
    """Whether the launcher that attends a run has been away for too long to come back."""
    if not run.task.attended:
        return False
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
    if seen.beat.tied and any(_find_ranks(cluster, run, node)):
        return True
    return now - seen.heard > cluster.settings.node_patience_seconds


def _alive(cluster: ClusterState, run: Run, node: str) -> bool:
    """Whether all ranks of a node send beats, or have reported that they finished."""
    ranks = _find_ranks(cluster, run, node)
    return all(rank is not None and (rank.presence is Presence.LIVE or _has_finished(rank)) for rank in ranks)


def finished_ranks(cluster: ClusterState, run: Run) -> set[int]:
    """Ranks of the attempt that have themselves reported that they finished."""
    ranks = (cluster.ranks.find(run.rank(at.rank), at.incarnation) for at in run.places)
    return {rank.id.rank for rank in ranks if rank is not None and _has_finished(rank)}


def _find_ranks(cluster: ClusterState, run: Run, node: str) -> list[Rank | None]:
    """The ranks of the attempt on a node, each once it has joined."""
    return [cluster.ranks.find(run.rank(at.rank), at.incarnation) for at in run.places if at.node == node]


def _has_finished(rank: Rank) -> bool:
    return rank.presence is Presence.LEFT and rank.left == "finished"


# ── fitness ──


def find_slow(paces: Mapping[str, tuple[str, float]]) -> dict[str, Phrase]:
    """Of the times that one computation took on each node, and on what: which are far too long, and by how much."""
    slow = {}
    for node, (on, seconds) in paces.items():
        alike = [other for what, other in paces.values() if what == on]
        middle = median(alike)
        if len(alike) >= PEERS and middle > 0 and seconds > SLOW * middle:
            slow[node] = phrase("slower_than_nodes", times=seconds / middle, count=len(alike), on=on)
    return slow


def unfit_reasons(cluster: ClusterState, node: str) -> tuple[Prose, ...]:
    """Why a node is not fit, as far as results show."""
    results = {name: seen.beat.fitness for name, seen in cluster.runtime.nodes.items() if seen.beat.fitness is not None}
    if node not in results:
        return ()
    slow = find_slow({name: (fit.on, fit.pace) for name, fit in results.items() if fit.pace is not None})
    return (*results[node].unfit, *([phrase("computes_slowly", how=slow[node])] if node in slow else []))


def is_checked(cluster: ClusterState, run: Run, node: str, now: float) -> bool:
    """Whether there is a valid result for this node, with the checkpoint folder of this run."""
    fitness = cluster.runtime.nodes[node].beat.fitness
    if fitness is None or not fitness.number or fitness.running or fitness.folder != _folder(run):
        return False
    holds = AGAIN_SECONDS if unfit_reasons(cluster, node) else FRESH_SECONDS
    return now - cluster.runtime.examined.get(node, now) < holds


def select_fit(cluster: ClusterState, run: Run, nodes: list[str], now: float) -> list[str]:
    """The nodes that a run may use: none while results are missing, unless that takes too long."""
    if not run.task.check:
        return nodes
    checked = [node for node in nodes if is_checked(cluster, run, node, now)]
    if len(checked) < len(nodes) and now < max(run.since, run.arrived) + PATIENCE_SECONDS:
        return []
    return [node for node in checked if not unfit_reasons(cluster, node)]


def request_checks(cluster: ClusterState, run: Run, nodes: Iterable[str], now: float) -> Decision:
    """The agents whose nodes must be checked before a run can be placed are to do so."""
    if not run.task.check:
        return NOTHING
    command = Examine(term=cluster.term, job=run.name, attempt=run.attempt, folder=_folder(run))
    return Decision(tasks=tuple((node, command) for node in nodes if not is_checked(cluster, run, node, now)))


def _folder(run: Run) -> str:
    folder = run.task.checkpoint_dir
    return f"{run.task.cwd}/{folder}" if folder and not folder.startswith("/") else folder


def record_fitness(cluster: ClusterState, node: str) -> tuple[Record, ...]:
    """An agent reported a result: one incident from when its node is not fit until it is."""
    fitness = cluster.runtime.nodes[node].beat.fitness
    if fitness is None or fitness.running:
        return ()
    about, why = About(node=node, part="fitness"), unfit_reasons(cluster, node)
    incident = cluster.incidents.find_open("", about)
    if incident is None and why:
        opened = IncidentOpened(
            id=provisional("fitness", node),
            what=phrase("node_not_fit", node=node, why=why[0]),
            about=about,
            evidence=why,
            decision=phrase("unfit_gets_no_ranks"),
            reason=phrase("together", parts=why),
            kind="device_warning",
        )
        return (opened,)
    if incident is not None and not why:
        return (close_incident(incident.id, phrase("node_fit_again")),)
    return ()
