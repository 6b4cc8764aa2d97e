"""Replicas under torchft: what they report, which members their lighthouse must not count on, and replicas that leave.

A lighthouse alone waits for a dead replica until its heartbeats have been missing for long enough. The weaver learns of
its end at once and evicts it, by the id that torchft made for that incarnation and never uses again. Evictions are in
the log, and are repeated to the lighthouse until its own beats confirm them.

Operators can make a replica leave where the others continue without it. An evicted replica is killed before its
lighthouse learns of it, and restarted. A drained one ends its loop itself, at the end of a step, and is restarted when
an operator undoes the drain.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import NamedTuple

from torchloom.core.changes.requests import request_id, steer_unasked
from torchloom.core.decision import NOTHING, Decision, Handlers, Refused, merge_decisions
from torchloom.core.jobs.restart_decision import Cause, stop
from torchloom.core.state.change_ledger import ChangePhase
from torchloom.core.state.cluster import ClusterState, life_over
from torchloom.core.state.rank_states import PRESENT, Presence, Rank
from torchloom.core.state.run_states import Run, RunPhase
from torchloom.core.torchft.replica_groups import siblings, trains
from torchloom.protocol import rank as reports
from torchloom.protocol import records
from torchloom.protocol.ids import RankId, ReplicaId
from torchloom.protocol.lighthouse import Evict
from torchloom.protocol.operator import Done, DrainReplica, EvictReplica, ReplicaDrained, Steer
from torchloom.protocol.phrase import Prose, phrase
from torchloom.protocol.records import Record
from torchloom.protocol.run_records import AttemptStopping, RunEnded

RECORDS: Mapping[type[reports.Report], type[reports.ReportRecord]] = {
    reports.Regrouped: reports.MemberRegrouped,
    reports.Healed: reports.MemberHealed,
    reports.Discarded: reports.MemberDiscarded,
}
"""What is recorded of each report."""
MOST_TRIES = 100
"""Requests to one attempt to leave: other changes may be under way, or ranks be lost just then."""


def handle_joined(cluster: ClusterState, rank: Rank, report: reports.Joined) -> Decision:
    if rank.member == report.member:
        return NOTHING
    joined = Decision((reports.MemberJoined.from_fields(report, rank=rank.id, devices=rank.devices),))
    if rank.presence in PRESENT:
        return joined
    # It was gone before its report was read.
    return joined + evict(cluster, rank.id.job, (report.member,), phrase("life_has_ended"))


def record_report(_cluster: ClusterState, rank: Rank, report: reports.Report) -> Decision:
    return Decision((RECORDS[type(report)].from_fields(report, rank=rank.id),))


# ── evicting ──


def evict(cluster: ClusterState, job: str, members: Iterable[str], reason: Prose) -> Decision:
    """Evict the members that were not evicted before."""
    evicted = cluster.evicted.get(job, ())
    new = tuple(dict.fromkeys(member for member in members if member and member not in evicted))
    if not new:
        return NOTHING
    return Decision(
        (records.MembersEvicted(job=job, members=new, reason=reason),),
        evictions=((job, Evict(term=cluster.term, members=new, reason=reason)),),
    )


class Gone(NamedTuple):
    job: str
    member: str
    why: Prose


def add_evictions(cluster: ClusterState, decision: Decision) -> Decision:
    """Add to a decision the evictions of the members whose incarnation it ends."""
    gone = [lost for record in decision.stored for lost in _find_departed(cluster, record)]
    return decision + _evict_gone(cluster, gone) if gone else decision


def _evict_gone(cluster: ClusterState, gone: list[Gone]) -> Decision:
    """All ranks of a replica have one id."""
    once = {lost.member: lost for lost in reversed(gone)}
    return merge_decisions(evict(cluster, lost.job, (lost.member,), lost.why) for lost in once.values())


def _find_departed(cluster: ClusterState, record: Record) -> list[Gone]:
    """The members whose incarnation ends with a record, and why."""
    match record:
        case records.RankDied(rank=rank, reason=reason, confirmed=True):
            return _departed_members(cluster, [rank], reason)
        case records.RankLeft(rank=rank, how=how):
            return _departed_members(cluster, [rank], life_over(how))
        case AttemptStopping(job=job, reason=reason) | RunEnded(job=job, reason=reason):
            run = cluster.runs.by_name[job]
            met = [Gone(run.replica_id.job, member, reason) for member in _members_at(cluster, run)]
            # All ranks of a replica end together.
            ended = cluster.ranks_of(run) if isinstance(record, AttemptStopping) else ()
            return [*_departed_members(cluster, ended, reason), *met]
        case records.RankJoined(rank=rank):
            before = cluster.ranks.get(rank)
            again = before is not None and before.presence is not Presence.LIVE
            return _departed_members(cluster, [rank], phrase("life_replaced")) if again else []
    return []


def _departed_members(cluster: ClusterState, ranks: Iterable[RankId], why: Prose) -> list[Gone]:
    joined = [cluster.ranks[rank] for rank in ranks if rank in cluster.ranks]
    return [Gone(rank.id.job, rank.member, why) for rank in joined if rank.member]


def _members_at(cluster: ClusterState, run: Run) -> list[str]:
    """Members that met at the address of this attempt: so also those whose script reports nothing are found."""
    beat = cluster.runtime.lighthouses.get(run.replica_id.job)
    where = f"{run.host}:{run.port}"
    return [member for member, store in beat.stores.items() if store == where] if beat is not None and run.port else []


def handle_lighthouse_beat(cluster: ClusterState, job: str) -> Decision:
    """Repeat evictions that the lighthouse has not confirmed, and evict members it counts on that are gone."""
    beat = cluster.runtime.lighthouses[job]
    missing = tuple(member for member in cluster.evicted.get(job, ()) if member not in beat.evicted)
    counted = {*beat.members, *beat.waiting}
    gone = [
        Gone(job, rank.member, rank.reason or phrase("life_gone"))
        for rank in cluster.ranks.of_job(job)
        if rank.member in counted and rank.presence in {Presence.FAILED, Presence.LEFT}
    ]
    again = Decision(evictions=((job, Evict(term=cluster.term, members=missing)),)) if missing else NOTHING
    return again + _evict_gone(cluster, gone)


# ── operators ──


def evict_replica(cluster: ClusterState, ask: EvictReplica, now: float) -> Decision:
    replica = ReplicaId(ask.job, ask.replica)
    reason = phrase("replica_evicted", operator=ask.operator)
    run = cluster.runs.of(replica)
    if run is not None and run.task.torchft is not None and not run.is_lighthouse:
        if run.drained and run.phase is not RunPhase.RUNNING:
            return Decision(answer=Done(text=phrase("is_drained", name=replica, undo=False)))
        if not run.under_way:
            return Decision(answer=Done(text=phrase("is_in_phase", name=replica, phase=str(run.phase))))
        if _is_last(cluster, run):
            hint = phrase("kill_or_stop", replica=replica, job=ask.job)
            raise Refused(phrase("last_replica", replica=replica), hint)
        kill_now = tuple(place.rank for place in run.places)
        stopping = stop(cluster, run, now, Cause(reason, uses_restart=False, kill_now=kill_now))
        text = phrase("evicted", replica=replica, drained=run.drained)
        return replace(stopping, answer=Done(text=text, replicas=(replica,)))
    ranks = cluster.ranks.of_replica(replica)
    members = {rank.member for rank in ranks} - {""}
    if not ranks:
        raise Refused(phrase("replica_unknown", replica=replica), phrase("see_map"))
    if not members:
        raise Refused(phrase("not_under_torchft", replica=replica), phrase("kill_replica", replica=replica))
    if ask.job not in cluster.runtime.lighthouses:
        raise Refused(phrase("foreign_lighthouse", job=ask.job), phrase("kill_replica", replica=replica))
    if not _others_train(cluster, replica):
        raise Refused(phrase("last_replica", replica=replica), phrase("kill_replica_anyway", replica=replica))
    eviction = evict(cluster, ask.job, members, reason)
    return replace(eviction, answer=Done(text=phrase("out_of_quorum", replica=replica), replicas=(replica,)))


def drain_replica(cluster: ClusterState, ask: DrainReplica) -> Decision:
    replica = ReplicaId(ask.job, ask.replica)
    run = cluster.runs.of(replica)
    names = [str(other.replica_id) for other in cluster.runs.of_job(ask.job) if not other.is_lighthouse]
    if run is None and names:
        raise Refused(phrase("replica_unknown", replica=replica), phrase("replicas_are", job=ask.job, replicas=names))
    if run is None or run.task.torchft is None or run.is_lighthouse:
        raise Refused(phrase("replica_not_drainable", replica=replica), phrase("stop_or_drain_node", job=ask.job))
    if run.drained is not ask.undo:
        return Decision(answer=Done(text=phrase("is_drained", name=replica, undo=ask.undo)))
    record = ReplicaDrained(job=run.name, drained=not ask.undo, operator=ask.operator)
    if ask.undo:
        return Decision((record,), answer=Done(text=phrase("replica_returns", replica=replica)))
    if _is_last(cluster, run):
        raise Refused(phrase("last_replica", replica=replica), phrase("stop_job", job=ask.job))
    ranks = cluster.ranks.of_replica(run.replica_id)
    if run.phase is RunPhase.RUNNING and not any(rank.presence in PRESENT and not rank.counted for rank in ranks):
        raise Refused(phrase("no_manager_attached", replica=replica), phrase("evict_instead", replica=replica))
    return Decision((record,), answer=Done(text=phrase("replica_leaves", replica=replica))) + ask_to_leave(cluster, run)


def _is_last(cluster: ClusterState, run: Run) -> bool:
    """Whether it trains and no other replica does."""
    others = [other for other in siblings(cluster, run) if not other.drained]
    return run.phase is RunPhase.RUNNING and not any(trains(cluster, other) for other in others)


def _others_train(cluster: ClusterState, replica: ReplicaId) -> bool:
    """The same for replicas that torchLoom did not start. A rank that has reported step 0 has trained nothing yet."""
    others = [rank for rank in cluster.ranks.of_job(replica.job) if rank.id.replica_id != replica and rank.member]
    there = [rank for rank in others if rank.presence is Presence.LIVE and not cluster.is_evicted(rank)]
    beats = [cluster.runtime.last_beat(rank.id, rank.incarnation) for rank in there]
    return any(beat is None or beat.step > 0 for beat in beats)


def ask_to_leave(cluster: ClusterState, run: Run) -> Decision:
    """Repeated until the change is certain: another change may be under way just now, or this one may be aborted."""
    if run.phase is not RunPhase.RUNNING:
        return NOTHING
    job, replica = run.replica_id
    ask = Steer(request=_next_request(cluster, run), verb="stop", job=job, replica=replica, operator="drain")
    return steer_unasked(cluster, ask)


def _next_request(cluster: ClusterState, run: Run) -> str:
    """The id of the request that asks the attempt under way to leave: another one after each that was aborted."""
    for number in range(MOST_TRIES):
        request = request_id(run.name, run.attempt, "leaves", number)
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
