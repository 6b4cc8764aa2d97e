"""Replicas that leave: evicted at once by force, or drained at the end of a step until an operator undoes it.

Both make sense where the other replicas continue without them: in jobs under torchft. An evicted replica is killed
before its lighthouse learns of it, and restarted. A drained one ends its loop itself and is restarted when it may be.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace

from torchloom.core.changes import requests
from torchloom.core.decision import NOTHING, Decision, Handlers, merge_decisions, refuse
from torchloom.core.jobs.attempt_stop import Cause, stop
from torchloom.core.state.change_ledger import ChangePhase
from torchloom.core.state.cluster import ClusterState
from torchloom.core.state.ranks import PRESENT, Presence
from torchloom.core.state.runs import Run, RunPhase
from torchloom.core.torchft.members import evict
from torchloom.core.torchft.replica_groups import siblings, trains
from torchloom.protocol.ids import ReplicaId
from torchloom.protocol.operator import Done, DrainReplica, EvictReplica, ReplicaDrained, Steer
from torchloom.protocol.phrase import phrase

MOST_TRIES = 100
"""Requests to one attempt to leave: other changes may be under way, or ranks be lost just then."""


def evict_replica(cluster: ClusterState, ask: EvictReplica, now: float) -> Decision:
    replica = ReplicaId(ask.job, ask.replica)
    reason = phrase("replica_evicted", operator=ask.operator)
    run = cluster.runs.of(replica)
    if run is not None and run.task.torchft is not None and not run.is_lighthouse:
        if run.drained and run.phase is not RunPhase.RUNNING:
            return Decision(answer=Done(text=phrase("replica_drained", replica=replica)))
        if not run.under_way:
            return Decision(answer=Done(text=phrase("replica_is", replica=replica, phase=str(run.phase))))
        if _is_last(cluster, run):
            hint = phrase("kill_or_stop", replica=replica, job=ask.job)
            return refuse(phrase("last_replica", replica=replica), hint)
        kill_now = tuple(place.rank for place in run.places)
        stopping = stop(cluster, run, now, Cause(reason, uses_restart=False, kill_now=kill_now))
        text = phrase("evicted_and_drained" if run.drained else "evicted_and_restarted", replica=replica)
        return replace(stopping, answer=Done(text=text, replicas=(replica,)))
    ranks = cluster.ranks.of_replica(replica)
    members = {rank.member for rank in ranks} - {""}
    if not ranks:
        return refuse(phrase("replica_unknown", replica=replica), phrase("see_map"))
    if not members:
        return refuse(phrase("not_under_torchft", replica=replica), phrase("kill_replica", replica=replica))
    if ask.job not in cluster.runtime.lighthouses:
        return refuse(phrase("foreign_lighthouse", job=ask.job), phrase("kill_replica", replica=replica))
    if not _others_train(cluster, replica):
        return refuse(phrase("last_replica", replica=replica), phrase("kill_replica_anyway", replica=replica))
    eviction = evict(cluster, ask.job, members, reason)
    return replace(eviction, answer=Done(text=phrase("out_of_quorum", replica=replica), replicas=(replica,)))


def drain_replica(cluster: ClusterState, ask: DrainReplica) -> Decision:
    replica = ReplicaId(ask.job, ask.replica)
    run = cluster.runs.of(replica)
    if run is None and (
        names := [str(other.replica_id) for other in cluster.runs.of_job(ask.job) if not other.is_lighthouse]
    ):
        return refuse(phrase("replica_unknown", replica=replica), phrase("replicas_are", job=ask.job, replicas=names))
    if run is None or run.task.torchft is None or run.is_lighthouse:
        return refuse(phrase("replica_not_drainable", replica=replica), phrase("stop_or_drain_node", job=ask.job))
    if run.drained is not ask.undo:
        text = phrase("replica_not_drained" if ask.undo else "replica_drained", replica=replica)
        return Decision(answer=Done(text=text))
    record = ReplicaDrained(job=run.name, drained=not ask.undo, operator=ask.operator)
    if ask.undo:
        return Decision((record,), answer=Done(text=phrase("replica_returns", replica=replica)))
    if _is_last(cluster, run):
        return refuse(phrase("last_replica", replica=replica), phrase("stop_job", job=ask.job))
    ranks = cluster.ranks.of_replica(run.replica_id)
    if run.phase is RunPhase.RUNNING and not any(rank.presence in PRESENT and not rank.counted for rank in ranks):
        return refuse(phrase("no_manager_attached", replica=replica), phrase("evict_instead", replica=replica))
    text = phrase("replica_leaves", replica=replica)
    first = Decision((record,))
    return replace(merge_decisions([first, ask_to_leave(cluster, run)]), answer=Done(text=text))


def _is_last(cluster: ClusterState, run: Run) -> bool:
    """Whether it trains and no other replica does."""
    others = [other for other in siblings(cluster, run) if not other.drained]
    return run.phase is RunPhase.RUNNING and not any(trains(cluster, other) for other in others)


def _others_train(cluster: ClusterState, replica: ReplicaId) -> bool:
    """The same for replicas that torchLoom did not start. A rank that has reported step 0 has trained nothing yet."""
    out = cluster.evicted.get(replica.job, ())
    others = [rank for rank in cluster.ranks.of_job(replica.job) if rank.id.replica_id != replica]
    there = [rank for rank in others if rank.presence is Presence.LIVE and rank.member and rank.member not in out]
    beats = [rank_runtime.beat if (rank_runtime := cluster.runtime.ranks.get(rank.id)) else None for rank in there]
    return any(beat is None or beat.step > 0 for beat in beats)


def ask_to_leave(cluster: ClusterState, run: Run) -> Decision:
    """Repeated until the change is certain: another change may be under way just now, or this one may be aborted."""
    if run.phase is not RunPhase.RUNNING:
        return NOTHING
    request = _next_request(cluster, run)
    if request in cluster.runtime.operations.by_request or cluster.ledger.change_of(request) is not None:
        return NOTHING
    ask = Steer(request=request, verb="stop", job=run.replica_id.job, replica=run.replica_id.replica, operator="drain")
    return replace(requests.request_change(cluster, ask, ""), answer=None)


def _next_request(cluster: ClusterState, run: Run) -> str:
    """The id of the request that asks the attempt under way to leave: another one after each that was aborted."""
    for number in range(MOST_TRIES):
        request = hashlib.sha256(f"{run.name} {run.attempt} leaves {number}".encode()).hexdigest()[:32]
        change = cluster.ledger.change_of(request)
        if change is None or change.phase is not ChangePhase.ABORTED:
            return request
    return request


def was_asked_to_leave(cluster: ClusterState, run: Run) -> bool:
    """Whether its ranks end because of such a request, even if the drain was undone since."""
    change = cluster.ledger.change_of(_next_request(cluster, run))
    return change is not None and change.takes_effect


HANDLERS: Handlers = {
    EvictReplica: lambda cluster, ask, _reply, now: evict_replica(cluster, ask, now),
    DrainReplica: lambda cluster, ask, _reply, _now: drain_replica(cluster, ask),
}
