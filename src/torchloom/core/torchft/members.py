"""Replicas under torchft: what they report, and which members their lighthouse must not count on any more.

A lighthouse alone waits for a dead replica until its heartbeats have been missing for long enough. The weaver learns of
its end at once and evicts it, by the id that torchft made for that incarnation and never uses again. Evictions are in
the log, and are repeated to the lighthouse until its own beats confirm them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import NamedTuple

from torchloom.core.decision import NOTHING, Decision, merge_decisions
from torchloom.core.state.cluster import ClusterState, life_over
from torchloom.core.state.ranks import PRESENT, Presence
from torchloom.core.state.runs import Run
from torchloom.protocol.ids import RankId
from torchloom.protocol.lighthouse import Evict
from torchloom.protocol.phrase import Prose, phrase
from torchloom.protocol.rank import Discarded, Healed, Joined, Regrouped
from torchloom.protocol.records import (
    MemberDiscarded,
    MemberHealed,
    MemberJoined,
    MemberRegrouped,
    MembersEvicted,
    RankDied,
    RankJoined,
    RankLeft,
    Record,
)
from torchloom.protocol.run_records import AttemptStopping, RunEnded


def handle_report(cluster: ClusterState, rank: RankId, report: Joined | Regrouped | Healed | Discarded) -> Decision:
    """Reports of superseded or unknown incarnations are ignored."""
    member_rank = cluster.ranks.find(rank, report.incarnation)
    if member_rank is None:
        return NOTHING
    match report:
        case Joined(member=member):
            if member_rank.member == member:
                return NOTHING
            first = Decision((MemberJoined.from_fields(report, rank=rank, devices=member_rank.devices),))
            late = member_rank.presence not in PRESENT  # it was gone before its report was read
            return (
                merge_decisions([first, evict(cluster, rank.job, (member,), phrase("life_has_ended"))])
                if late
                else first
            )
        case Regrouped():
            return Decision((MemberRegrouped.from_fields(report, rank=rank),))
        case Healed():
            return Decision((MemberHealed.from_fields(report, rank=rank),))
        case Discarded():
            return Decision((MemberDiscarded.from_fields(report, rank=rank),))


# ── evicting ──


def evict(cluster: ClusterState, job: str, members: Iterable[str], reason: Prose) -> Decision:
    """Evict the members that were not evicted before."""
    evicted = cluster.evicted.get(job, ())
    new = tuple(dict.fromkeys(member for member in members if member and member not in evicted))
    if not new:
        return NOTHING
    return Decision(
        (MembersEvicted(job=job, members=new, reason=reason),),
        evictions=((job, Evict(term=cluster.term, members=new, reason=reason)),),
    )


class Gone(NamedTuple):
    job: str
    member: str
    why: Prose


def add_evictions(cluster: ClusterState, decision: Decision) -> Decision:
    """Add to a decision the evictions of the members whose incarnation it ends."""
    gone = [lost for record in decision.stored for lost in _find_departed(cluster, record)]
    return (
        replace(merge_decisions([decision, *_evictions(cluster, gone)]), answer=decision.answer) if gone else decision
    )


def _evictions(cluster: ClusterState, gone: list[Gone]) -> list[Decision]:
    """All ranks of a replica have one id."""
    once = {lost.member: lost for lost in reversed(gone)}
    return [evict(cluster, lost.job, (lost.member,), lost.why) for lost in once.values()]


def _find_departed(cluster: ClusterState, record: Record) -> list[Gone]:
    """The members whose incarnation ends with a record, and why."""
    match record:
        case RankDied(rank=rank, reason=reason, confirmed=True):
            return _departed_members(cluster, [rank], reason)
        case RankLeft(rank=rank, how=how):
            return _departed_members(cluster, [rank], life_over(how))
        case AttemptStopping(job=job, reason=reason):  # all ranks of a replica end together
            run = cluster.runs.by_name[job]
            met = [Gone(run.replica_id.job, member, reason) for member in _members_at(cluster, run)]
            return [*_departed_members(cluster, cluster.ranks_of(run), reason), *met]
        case RunEnded(job=job, reason=reason):
            run = cluster.runs.by_name[job]
            return [Gone(run.replica_id.job, member, reason) for member in _members_at(cluster, run)]
        case RankJoined(rank=rank):
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
    return merge_decisions([again, *_evictions(cluster, gone)])
