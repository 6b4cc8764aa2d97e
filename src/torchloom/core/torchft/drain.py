"""Replicas that are to leave: by force and at once, or at the end of a step and for as long as someone wants.

Both are of use where the others go on without them, so for jobs under torchft. Who is evicted is killed before the
lighthouse is told, and started again. Who is drained ends its loop by itself and is started again when it may.
"""

from __future__ import annotations

from dataclasses import replace

from torchloom.core.changes import requests
from torchloom.core.decision import NOTHING, Decision, Handlers, together
from torchloom.core.jobs.attempt_stop import Cause, stop
from torchloom.core.jobs.reconcile import UNDER_WAY
from torchloom.core.state.cluster import ClusterState
from torchloom.core.state.presence import PRESENT, Presence
from torchloom.core.state.runs import Run, RunPhase
from torchloom.core.torchft import drain_request
from torchloom.core.torchft.members import evict
from torchloom.core.torchft.replica_groups import siblings, trains
from torchloom.protocol.ids import ReplicaId
from torchloom.protocol.operator import Done, DrainReplica, EvictReplica, No, ReplicaDrained, Steer
from torchloom.protocol.phrase import Phrase, phrase


def evict_replica(cluster: ClusterState, ask: EvictReplica, now: float) -> Decision:
    replica = ReplicaId(ask.job, ask.replica)
    reason = phrase("replica_evicted", operator=ask.operator)
    run = cluster.runs.of(replica)
    if run is not None and run.task.torchft is not None and not run.serves:
        if run.drained and run.phase is not RunPhase.RUNNING:
            return Decision(answer=Done(text=phrase("replica_drained", replica=replica)))
        if run.phase not in UNDER_WAY:
            return Decision(answer=Done(text=phrase("replica_is", replica=replica, phase=str(run.phase))))
        if _is_last(cluster, run):
            hint = phrase("kill_or_stop", replica=replica, job=ask.job)
            return _no(phrase("last_replica", replica=replica), hint)
        deaf = tuple(place.rank for place in run.places)
        stopping = stop(cluster, run, now, Cause(reason, blame=False, deaf=deaf))
        text = phrase("evicted_and_drained" if run.drained else "evicted_and_restarted", replica=replica)
        return replace(stopping, answer=Done(text=text, replicas=(replica,)))
    ranks = [rank for rank in cluster.ranks_of_job.get(ask.job, ()) if rank.of == replica]
    members = {cluster.ranks[rank].member for rank in ranks} - {""}
    if not ranks:
        return _no(phrase("replica_unknown", replica=replica), phrase("see_map"))
    if not members:
        return _no(phrase("not_under_torchft", replica=replica), phrase("kill_replica", replica=replica))
    if ask.job not in cluster.runtime.lighthouses:
        return _no(phrase("foreign_lighthouse", job=ask.job), phrase("kill_replica", replica=replica))
    if not _others_train(cluster, replica):
        return _no(phrase("last_replica", replica=replica), phrase("kill_replica_anyway", replica=replica))
    told = evict(cluster, ask.job, members, reason)
    return replace(told, answer=Done(text=phrase("out_of_quorum", replica=replica), replicas=(replica,)))


def drain_replica(cluster: ClusterState, ask: DrainReplica) -> Decision:
    replica = ReplicaId(ask.job, ask.replica)
    run = cluster.runs.of(replica)
    if run is None and (known := [str(other.of) for other in cluster.runs.of_job(ask.job) if not other.serves]):
        return _no(phrase("replica_unknown", replica=replica), phrase("replicas_are", job=ask.job, replicas=known))
    if run is None or run.task.torchft is None or run.serves:
        return _no(phrase("replica_not_drainable", replica=replica), phrase("stop_or_drain_node", job=ask.job))
    if run.drained is not ask.undo:
        text = phrase("replica_not_drained" if ask.undo else "replica_drained", replica=replica)
        return Decision(answer=Done(text=text))
    record = ReplicaDrained(job=run.job, drained=not ask.undo, operator=ask.operator)
    if ask.undo:
        return Decision((record,), answer=Done(text=phrase("replica_returns", replica=replica)))
    if _is_last(cluster, run):
        return _no(phrase("last_replica", replica=replica), phrase("stop_job", job=ask.job))
    ranks = [cluster.ranks[rank] for rank in cluster.ranks_of(run)]
    if run.phase is RunPhase.RUNNING and not any(rank.presence in PRESENT and not rank.counted for rank in ranks):
        return _no(phrase("no_manager_attached", replica=replica), phrase("evict_instead", replica=replica))
    text = phrase("replica_leaves", replica=replica)
    first = Decision((record,))
    return replace(together([first, ask_to_leave(cluster, run)]), answer=Done(text=text))


def _is_last(cluster: ClusterState, run: Run) -> bool:
    """Whether it trains and no other replica does."""
    others = [other for other in siblings(cluster, run) if not other.drained]
    return run.phase is RunPhase.RUNNING and not any(trains(cluster, other) for other in others)


def _others_train(cluster: ClusterState, replica: ReplicaId) -> bool:
    """The same of replicas that others have started: what has said no step yet, and could have, has nothing."""
    out = cluster.evicted.get(replica.job, ())
    others = [cluster.ranks[rank] for rank in cluster.ranks_of_job[replica.job] if rank.of != replica]
    there = [rank for rank in others if rank.presence is Presence.LIVE and rank.member and rank.member not in out]
    beats = [rank_runtime.beat if (rank_runtime := cluster.runtime.ranks.get(rank.id)) else None for rank in there]
    return any(beat is None or beat.step > 0 for beat in beats)


def ask_to_leave(cluster: ClusterState, run: Run) -> Decision:
    """Again and again until it is certain: another change may be under way just now, or this one come to nothing."""
    if run.phase is not RunPhase.RUNNING:
        return NOTHING
    request = drain_request.request(cluster, run)
    if request in cluster.runtime.operations.by_request or cluster.ledger.change_of(request) is not None:
        return NOTHING
    ask = Steer(request=request, verb="stop", job=run.of.job, replica=run.of.replica, operator="drain")
    asked = requests.act(cluster, ask, "")
    return Decision(asked.records, asked.commands)


def _no(why: Phrase, hint: Phrase) -> Decision:
    return Decision(answer=No(why=why, hint=hint))


HANDLERS: Handlers = {
    EvictReplica: lambda cluster, ask, _reply, now: evict_replica(cluster, ask, now),
    DrainReplica: lambda cluster, ask, _reply, _now: drain_replica(cluster, ask),
}
