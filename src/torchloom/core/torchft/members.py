"""Replicas under torchft: what they say of themselves, and whom their lighthouse must not count on any more.

A lighthouse alone waits for a dead replica until heartbeats have been missing for long enough. Here its end is known
at once, so it is evicted: by the id that torchft made for that one life of it, which is never used again. What was
evicted is in the log, and the lighthouse is told until its own beats show that it knows.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import NamedTuple

from torchloom.core.decision import NOTHING, Decision, merge_decisions
from torchloom.core.state.cluster import ClusterState, life_over
from torchloom.core.state.fields import copy_fields
from torchloom.core.state.presence import PRESENT, Presence
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


def handle_report(cluster: ClusterState, rank: RankId, said: Joined | Regrouped | Healed | Discarded) -> Decision:
    """What a life says that is over, or that nobody knows of, is not listened to."""
    known = cluster.ranks.find(rank, said.incarnation)
    if known is None:
        return NOTHING
    match said:
        case Joined(member=member):
            if known.member == member:
                return NOTHING
            first = Decision((copy_fields(MemberJoined, said, rank=rank, devices=known.devices),))
            late = known.presence not in PRESENT  # it told who it is, and was gone before that was heard
            return (
                merge_decisions([first, evict(cluster, rank.job, (member,), phrase("life_has_ended"))])
                if late
                else first
            )
        case Regrouped():
            return Decision((copy_fields(MemberRegrouped, said, rank=rank),))
        case Healed():
            return Decision((copy_fields(MemberHealed, said, rank=rank),))
        case Discarded():
            return Decision((copy_fields(MemberDiscarded, said, rank=rank),))


# ── evicting ──


def evict(cluster: ClusterState, job: str, members: Iterable[str], reason: Prose) -> Decision:
    """Those among them that were not evicted before."""
    known = cluster.evicted.get(job, ())
    new = tuple(dict.fromkeys(member for member in members if member and member not in known))
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
    """A decision by which ranks are gone, and what follows from it for the lighthouses of their jobs."""
    gone = [lost for record in decision.stored for lost in _find_departed(cluster, record)]
    return (
        replace(merge_decisions([decision, *_evictions(cluster, gone)]), answer=decision.answer) if gone else decision
    )


def _evictions(cluster: ClusterState, gone: list[Gone]) -> list[Decision]:
    """All ranks of a replica go under one id."""
    once = {lost.member: lost for lost in reversed(gone)}
    return [evict(cluster, lost.job, (lost.member,), lost.why) for lost in once.values()]


def _find_departed(cluster: ClusterState, record: Record) -> list[Gone]:
    """Whose life is over, and why."""
    match record:
        case RankDied(rank=rank, reason=reason, confirmed=True):
            return _departed_members(cluster, [rank], reason)
        case RankLeft(rank=rank, how=how):
            return _departed_members(cluster, [rank], life_over(how))
        case AttemptStopping(job=job, reason=reason):  # a replica goes whole
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
    known = [cluster.ranks[rank] for rank in ranks if rank in cluster.ranks]
    return [Gone(rank.id.job, rank.member, why) for rank in known if rank.member]


def _members_at(cluster: ClusterState, run: Run) -> list[str]:
    """Who met where the ranks of this attempt were told to: so a script that says nothing is known, too."""
    beat = cluster.runtime.lighthouses.get(run.replica_id.job)
    where = f"{run.host}:{run.port}"
    return [member for member, store in beat.stores.items() if store == where] if beat is not None and run.port else []


def handle_lighthouse_beat(cluster: ClusterState, job: str) -> Decision:
    """It is told again what it does not know, and of those it counts on who is gone."""
    beat = cluster.runtime.lighthouses[job]
    missing = tuple(member for member in cluster.evicted.get(job, ()) if member not in beat.evicted)
    counted = {*beat.members, *beat.waiting}
    gone = [
        Gone(job, known.member, known.reason or phrase("life_gone"))
        for known in cluster.ranks.of_job(job)
        if known.member in counted and known.presence in {Presence.FAILED, Presence.LEFT}
    ]
    again = Decision(evictions=((job, Evict(term=cluster.term, members=missing)),)) if missing else NOTHING
    return merge_decisions([again, *_evictions(cluster, gone)])
