"""Replicas that are to leave: by force and at once, or at the end of a step and for as long as someone wants.

Both are of use where the others go on without them, so for jobs under torchft. Who is evicted is killed before the
lighthouse is told, and started again. Who is drained ends its loop by itself and is started again when it may.
"""

from __future__ import annotations

from dataclasses import replace

from torchloom.core import parting, wishes
from torchloom.core.decision import NOTHING, Decision, together
from torchloom.core.fabric import Fabric
from torchloom.core.grouping import siblings, trains
from torchloom.core.members import evict
from torchloom.core.presence import PRESENT, Presence
from torchloom.core.running import UNDER_WAY
from torchloom.core.runs import Run, RunPhase
from torchloom.core.stopping import Cause, stop
from torchloom.messages import Done, DrainReplica, EvictReplica, No, ReplicaDrained, ReplicaId, Steer

LAST = "is the last one that trains: nothing would be left to heal from"


def evict_replica(fabric: Fabric, ask: EvictReplica, now: float) -> Decision:
    replica = ReplicaId(ask.job, ask.replica)
    reason = f"evicted by {ask.operator}" if ask.operator else "evicted"
    run = fabric.runs.of(replica)
    if run is not None and run.task.torchft is not None and not run.serves:
        if run.drained and run.phase is not RunPhase.RUNNING:
            return Decision(answer=Done(text=f"{replica} is drained"))
        if run.phase not in UNDER_WAY:
            return Decision(answer=Done(text=f"{replica} is {run.phase}"))
        if _is_last(fabric, run):
            return _no(f"{replica} {LAST}", f"`loom kill {replica}` ends its ranks all the same; `loom stop {ask.job}`")
        deaf = tuple(place.rank for place in run.places)
        stopping = stop(fabric, run, now, Cause(reason, blame=False, deaf=deaf))
        then = "stays away: it is drained" if run.drained else "started again"
        return replace(stopping, answer=Done(text=f"{replica} is evicted, and {then}", replicas=(replica,)))
    ranks = [rank for rank in fabric.ranks_of_job.get(ask.job, ()) if rank.of == replica]
    members = {fabric.ranks[rank].member for rank in ranks} - {""}
    if not ranks:
        return _no(f"there is no replica {replica}", "`loom map` lists them")
    if not members:
        return _no(f"{replica} is not under torchft", f"`loom kill {replica}` ends its ranks")
    if ask.job not in fabric.watch.lighthouses:
        return _no(f"the lighthouse of {ask.job} is not torchLoom's", f"`loom kill {replica}` ends its ranks")
    if not _others_train(fabric, replica):
        return _no(f"{replica} {LAST}", f"`loom kill {replica}` ends its ranks all the same")
    told = evict(fabric, ask.job, members, reason)
    return replace(told, answer=Done(text=f"{replica} is evicted from the quorum", replicas=(replica,)))


def drain_replica(fabric: Fabric, ask: DrainReplica, now: float) -> Decision:
    replica = ReplicaId(ask.job, ask.replica)
    run = fabric.runs.of(replica)
    if run is None and (known := [str(other.of) for other in fabric.runs.of_job(ask.job) if not other.serves]):
        return _no(f"there is no replica {replica}", f"of {ask.job} there are {', '.join(known)}")
    if run is None or run.task.torchft is None or run.serves:
        why = f"{replica} is not a replica under torchft that torchLoom started"
        return _no(why, f"`loom stop {ask.job}` ends a job at a step; `loom drain NODE` keeps a machine free")
    if run.drained is not ask.undo:
        return Decision(answer=Done(text=f"{replica} is {'not ' if ask.undo else ''}drained"))
    record = ReplicaDrained(job=run.job, drained=not ask.undo, operator=ask.operator)
    if ask.undo:
        return Decision(
            (record,), answer=Done(text=f"{replica} is started again"), reason=f"{replica} is started again"
        )
    if _is_last(fabric, run):
        return _no(f"{replica} {LAST}", f"`loom stop {ask.job}`")
    ranks = [fabric.ranks[rank] for rank in fabric.ranks_of(run)]
    if run.phase is RunPhase.RUNNING and not any(rank.presence in PRESENT and not rank.counted for rank in ranks):
        why = f"{replica} cannot be asked: its script does not call torchloom.attach_manager()"
        return _no(why, f"`loom evict {replica}` ends it at once, and it is started again")
    text = f"{replica} leaves at the end of a step; `loom drain --undo {replica}` has it back"
    first = Decision((record,), reason=f"{replica} is drained")
    return replace(together([first, ask_to_leave(fabric, run, now)]), answer=Done(text=text))


def _is_last(fabric: Fabric, run: Run) -> bool:
    """Whether it trains and no other replica does."""
    others = [other for other in siblings(fabric, run) if not other.drained]
    return run.phase is RunPhase.RUNNING and not any(trains(fabric, other) for other in others)


def _others_train(fabric: Fabric, replica: ReplicaId) -> bool:
    """The same of replicas that others have started: what has said no step yet, and could have, has nothing."""
    out = fabric.evicted.get(replica.job, ())
    others = [fabric.ranks[rank] for rank in fabric.ranks_of_job[replica.job] if rank.of != replica]
    there = [rank for rank in others if rank.presence is Presence.LIVE and rank.member and rank.member not in out]
    beats = [pulse.beat if (pulse := fabric.watch.pulses.get(rank.id)) else None for rank in there]
    return any(beat is None or beat.step > 0 for beat in beats)


def ask_to_leave(fabric: Fabric, run: Run, now: float) -> Decision:
    """Again and again until it is certain: another change may be under way just now, or this one come to nothing."""
    if run.phase is not RunPhase.RUNNING:
        return NOTHING
    request = parting.request(fabric, run)
    if request in fabric.watch.courses.by_request or fabric.ledger.change_of(request) is not None:
        return NOTHING
    ask = Steer(request=request, verb="stop", job=run.of.job, replica=run.of.replica, operator="drain")
    asked = wishes.act(fabric, ask, "", now)
    return Decision(asked.records, asked.commands, reason=asked.reason, notes=asked.notes)


def _no(why: str, hint: str) -> Decision:
    return Decision(answer=No(why=why, hint=hint))
