"""Whom an operator means: a job, one of its replicas, or one rank, and whether that can be done to them now."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from torchloom.core.state.cluster import ClusterState
from torchloom.core.state.pending_operations import Lives
from torchloom.core.state.presence import Presence
from torchloom.protocol.operator import No
from torchloom.protocol.phrase import Prose, phrase


def find_target(cluster: ClusterState, job: str, replica: str | None, rank: int | None) -> Lives | No:
    """The living ranks meant, each with its life; or why there are none, or not all can be reached."""
    if job not in cluster.jobs:
        hint = did_you_mean(job, cluster.jobs, phrase("see_jobs"))
        return No(why=phrase("job_unknown", job=job), hint=hint)
    members = [cluster.ranks[id] for id in sorted(cluster.ranks.ids_of(job))]
    if replica is not None:
        replicas = {member.id.replica for member in members}
        if replica not in replicas:
            hint = did_you_mean(replica, replicas, phrase("see_replicas"))
            return No(why=phrase("job_has_no_replica", job=job, replica=replica), hint=hint)
        members = [member for member in members if member.id.replica == replica]
    if rank is not None:
        members = [member for member in members if member.id.rank == rank]
        if not members:
            why = phrase("replica_has_no_rank", job=job, replica=replica, rank=rank)
            return No(why=why, hint=phrase("see_ranks"))
    missing = [member for member in members if member.presence is Presence.LOST]
    if missing:
        return No(
            why=phrase("target_lost", rank=missing[0].id, reason=missing[0].reason),
            hint=phrase("wait_for_lost_rank"),
        )
    live = [member for member in members if member.presence is Presence.LIVE]
    if not live:
        return No(why=phrase("no_living_rank", job=job), hint=phrase("see_ended_ranks"))
    return tuple((member.id, member.incarnation) for member in live)


def split_group(cluster: ClusterState, lives: Lives, replica: str | None, rank: int | None) -> No | None:
    """Why one rank of a group that trains together cannot be told alone to pause, stop or save."""
    if rank is None:
        return None
    world = max(cluster.ranks[life[0]].world_size for life in lives)
    if world <= 1:
        return None
    return No(
        why=phrase("rank_not_alone", rank=rank, others=world - 1),
        hint=phrase("address_replica", job=lives[0][0].job, replica=replica),
    )


def did_you_mean(name: str, known: Iterable[str], otherwise: Prose) -> Prose:
    near = difflib.get_close_matches(name, list(known), n=1)
    return phrase("did_you_mean", name=near[0]) if near else otherwise
