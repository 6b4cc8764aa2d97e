"""Which nodes are fit for a job with `check`: by the checks of their agents, and by comparing their speed.

Nodes are checked when such a job is to be placed. A result is valid for a while; a node that was not fit is checked
again sooner, because an operator may have repaired it.
"""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median

from torchloom.core.incident_ids import close_incident, provisional
from torchloom.core.state.cluster import ClusterState
from torchloom.core.state.runs import Run
from torchloom.protocol.node import Examine, NodeCommand
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
    seen = cluster.runtime.nodes.get(node)
    if seen is None or seen.beat.fitness is None:
        return ()
    slower = find_slow(_paces(cluster)).get(node)
    return (*seen.beat.fitness.unfit, *([phrase("computes_slowly", how=slower)] if slower else []))


def _paces(cluster: ClusterState) -> dict[str, tuple[str, float]]:
    checks = ((node, seen.beat.fitness) for node, seen in cluster.runtime.nodes.items())
    return {node: (fit.on, fit.pace) for node, fit in checks if fit is not None and fit.pace is not None}


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
    if len(checked) < len(nodes) and now < run.since + PATIENCE_SECONDS:
        return []
    return [node for node in checked if not unfit_reasons(cluster, node)]


def request_checks(
    cluster: ClusterState, run: Run, nodes: list[str], now: float
) -> tuple[tuple[str, NodeCommand], ...]:
    """Commands to the agents whose nodes must be checked before a run can be placed."""
    if not run.task.check:
        return ()
    order = Examine(term=cluster.term, job=run.name, attempt=run.attempt, folder=_folder(run))
    return tuple((node, order) for node in nodes if not is_checked(cluster, run, node, now))


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
