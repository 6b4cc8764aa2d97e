"""Whom an operator means: a job, one of its replicas, or one rank, and whether that can be done to them now."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from torchloom.core.courses import Lives
from torchloom.core.fabric import Fabric
from torchloom.core.presence import Presence
from torchloom.messages import No, RankId


def find_target(fabric: Fabric, job: str, replica: str | None, rank: int | None) -> Lives | No:
    """The living ranks meant, each with its life; or why there are none, or not all can be reached."""
    if job not in fabric.jobs:
        return No(why=f"there is no job {job}", hint=did_you_mean(job, fabric.jobs, "`loom jobs` lists them"))
    members = [fabric.ranks[r] for r in sorted(fabric.ranks_of_job.get(job, ()))]
    if replica is not None:
        replicas = {member.id.replica for member in members}
        if replica not in replicas:
            hint = did_you_mean(replica, replicas, "`loom status` shows them")
            return No(why=f"job {job} has no replica {replica}", hint=hint)
        members = [member for member in members if member.id.replica == replica]
    if rank is not None:
        members = [member for member in members if member.id.rank == rank]
        if not members:
            return No(why=f"{job}/{replica} has no rank {rank}", hint="`loom status` shows them")
    missing = [member for member in members if member.presence is Presence.LOST]
    if missing:
        return No(
            why=f"{missing[0].id} is lost ({missing[0].reason}): not all ranks can be reached",
            hint="wait until it is back or called dead, then try again",
        )
    live = [member for member in members if member.presence is Presence.LIVE]
    if not live:
        return No(why=f"job {job} has no living rank to reach", hint="`loom status` shows what became of them")
    return tuple((member.id, member.incarnation) for member in live)


def split_group(fabric: Fabric, lives: Lives, replica: str | None, rank: int | None) -> No | None:
    """Why one rank of a group that trains together cannot be told alone to pause, stop or save."""
    if rank is None:
        return None
    world = max(fabric.ranks[life[0]].world_size for life in lives)
    if world <= 1:
        return None
    return No(
        why=f"rank {rank} trains together with {world - 1} other{'s' if world > 2 else ''}: "
        "alone it would leave them waiting for ever",
        hint=f"address the whole replica: {lives[0][0].job}/{replica}",
    )


def did_you_mean(name: str, known: Iterable[str], otherwise: str) -> str:
    near = difflib.get_close_matches(name, list(known), n=1)
    return f"did you mean {near[0]}?" if near else otherwise


def names(ranks: Iterable[RankId]) -> str:
    """Some ranks for a sentence: the first few, and how many more."""
    listed = sorted(ranks)
    shown = ", ".join(map(str, listed[:3]))
    return shown if len(listed) <= 3 else f"{shown} and {len(listed) - 3} more"
