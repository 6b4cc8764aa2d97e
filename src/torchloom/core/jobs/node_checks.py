"""Which nodes are fit for ranks of a job that wants to know: what agents found, and who is slow beside the others.

A node is looked at when a job that asks for it is to be placed. What was found holds for a while; one that was not fit
is looked at again soon, for someone may have mended it.
"""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median

from torchloom.core.incident_ids import close_incident, provisional
from torchloom.core.state.cluster import ClusterState
from torchloom.core.state.runs import Run
from torchloom.protocol.incident_records import About, IncidentOpened
from torchloom.protocol.node import Examine, NodeCommand
from torchloom.protocol.phrase import Phrase, Prose, phrase
from torchloom.protocol.records import Record

FRESH_SECONDS = 600.0
"""What was found holds so long."""
AGAIN_SECONDS = 60.0
"""The same, of a node that was not fit."""
PATIENCE_SECONDS = 120.0
"""So long a job waits for nodes that have not said yet; then it takes those that have."""
SLOW = 2.0
"""A node that takes this many times as long as the median of its peers is not fit."""
PEERS = 3
"""Nodes, itself among them, below which nobody can tell who is slow."""


def find_slow(paces: Mapping[str, tuple[str, float]]) -> dict[str, Phrase]:
    """Of the times that one computation took on each node, and on what: which are far too long, and by how much."""
    found = {}
    for node, (on, seconds) in paces.items():
        alike = [other for what, other in paces.values() if what == on]
        middle = median(alike)
        if len(alike) >= PEERS and middle > 0 and seconds > SLOW * middle:
            found[node] = phrase("slower_than_nodes", times=seconds / middle, count=len(alike), on=on)
    return found


def unfit_reasons(cluster: ClusterState, node: str) -> tuple[Prose, ...]:
    """Why a node is not fit, as far as is known."""
    seen = cluster.runtime.nodes.get(node)
    if seen is None or seen.beat.fitness is None:
        return ()
    slower = find_slow(_paces(cluster)).get(node)
    return (*seen.beat.fitness.unfit, *([phrase("computes_slowly", how=slower)] if slower else []))


def _paces(cluster: ClusterState) -> dict[str, tuple[str, float]]:
    known = ((node, seen.beat.fitness) for node, seen in cluster.runtime.nodes.items())
    return {node: (fit.on, fit.pace) for node, fit in known if fit is not None and fit.pace is not None}


def is_checked(cluster: ClusterState, run: Run, node: str, now: float) -> bool:
    """Whether it was looked at not long ago, with an eye on where this run saves."""
    fitness = cluster.runtime.nodes[node].beat.fitness
    if fitness is None or not fitness.number or fitness.running or fitness.folder != _folder(run):
        return False
    holds = AGAIN_SECONDS if unfit_reasons(cluster, node) else FRESH_SECONDS
    return now - cluster.runtime.examined.get(node, now) < holds


def select_fit(cluster: ClusterState, run: Run, nodes: list[str], now: float) -> list[str]:
    """Of these nodes, those that a run may use: none while some have not said, unless that takes too long."""
    if not run.task.check:
        return nodes
    known = [node for node in nodes if is_checked(cluster, run, node, now)]
    if len(known) < len(nodes) and now < run.since + PATIENCE_SECONDS:
        return []
    return [node for node in known if not unfit_reasons(cluster, node)]


def request_checks(
    cluster: ClusterState, run: Run, nodes: list[str], now: float
) -> tuple[tuple[str, NodeCommand], ...]:
    """Agents that have to look, before a run can be placed."""
    if not run.task.check:
        return ()
    order = Examine(term=cluster.term, job=run.name, attempt=run.attempt, folder=_folder(run))
    return tuple((node, order) for node in nodes if not is_checked(cluster, run, node, now))


def _folder(run: Run) -> str:
    folder = run.task.checkpoint_dir
    return f"{run.task.cwd}/{folder}" if folder and not folder.startswith("/") else folder


def record_fitness(cluster: ClusterState, node: str) -> tuple[Record, ...]:
    """An agent has looked: one incident from when its node is not fit until it is."""
    fitness = cluster.runtime.nodes[node].beat.fitness
    if fitness is None or fitness.running:
        return ()
    about, why = About(node=node, part="fitness"), unfit_reasons(cluster, node)
    known = cluster.incidents.find_open("", about)
    if known is None and why:
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
    if known is not None and not why:
        return (close_incident(known.id, phrase("node_fit_again")),)
    return ()
