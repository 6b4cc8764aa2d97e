"""What the watch makes of what it has seen, job by job. The service asks before it has anything decided.

Learning changes what is learnt, so it is no part of `decide`: what comes out of it is put into the events that are.
"""

from __future__ import annotations

from collections.abc import Iterator

from torchloom.core.detect.case import NEWS
from torchloom.core.detect.hang import Stand, Verdict
from torchloom.core.detect.words import seconds
from torchloom.core.events import Event, Found, JobDue
from torchloom.core.fabric import Fabric
from torchloom.core.grouping import siblings
from torchloom.core.presence import JobPhase, Presence
from torchloom.core.runs import Run, RunPhase
from torchloom.core.watch import Pulse
from torchloom.messages import RankId, RankStatus
from torchloom.settings import Settings

MAX_REPLICA = 10_000
"""Ranks of one replica at most, where those of several are numbered together."""


def hang_of_run(fabric: Fabric, job: str, now: float) -> Verdict | None:
    """Whether ranks of a run make no step, with what their agents see of them."""
    run = fabric.runs.active(job)
    if run is None or run.phase is not RunPhase.RUNNING:
        return None
    if run.task.torchft is not None:
        found = _hang_of_replica(fabric, run, now)
    else:
        case = fabric.watch.case(f"{job} {run.attempt}")
        found = case.look(_stands(fabric, run, now), fabric.settings, now, fabric.beat_seconds())
    for number in found.culprits if found is not None and found.kind == "frozen" else ():
        pulse = fabric.watch.pulses.get(run.rank(number))
        if pulse is not None:
            pulse.senses.pace.excuse()  # what somebody stopped is no measure of its steps
    return found


def _hang_of_replica(fabric: Fabric, run: Run, now: float) -> Verdict | None:
    """The replicas of a job wait for each other: only together do they show who is to blame.

    Where nobody stands out torchft itself gives up waiting, after its own time.
    """
    group = sorted(
        (other for other in (run, *siblings(fabric, run)) if other.phase is RunPhase.RUNNING), key=lambda one: one.job
    )
    # Ranks of several replicas have the same numbers.
    stands = [
        stand._replace(rank=stand.rank + place * MAX_REPLICA)
        for place, other in enumerate(group)
        for stand in _stands(fabric, other, now)
    ]
    case = fabric.watch.case(f"{run.job} {' '.join(f'{other.job}.{other.attempt}' for other in group)}")
    found = case.look(stands, fabric.settings, now, fabric.beat_seconds())
    if found is None:
        return None
    base = group.index(run) * MAX_REPLICA
    mine = tuple(number - base for number in found.culprits if base <= number < base + MAX_REPLICA)
    if not mine:
        return None
    lasted = f"{run.of.replica} has made no step for {seconds(found.seconds)}"
    others = len({number // MAX_REPLICA for number in found.waiting})
    waits = (f"{others} other replica{' waits' if others == 1 else 's wait'} for it",) if others else ()
    return found._replace(culprits=mine, waiting=(), why=(lasted, *waits))


def _stands(fabric: Fabric, run: Run, now: float) -> list[Stand]:
    return [
        stand
        for node, status in _statuses(fabric, run)
        if (stand := _seen(fabric, run, status, fabric.watch.node_speaks(node, now))) is not None
    ]


def look_at_jobs(fabric: Fabric, now: float) -> Iterator[Event]:
    """Once in a while: ranks that are slower than their peers, checkpoints that do not come, hangs of others' jobs."""
    for job in fabric.jobs.values():
        if job.phase is not JobPhase.RUNNING:
            continue
        ranks = [(rank, fabric.watch.pulses[rank]) for rank in fabric.ranks_of_job.get(job.name, ())]
        live = [(rank, pulse) for rank, pulse in ranks if not pulse.over and not pulse.missing and pulse.beat]
        own = {rank: pulse.senses.own for rank, pulse in live}
        for rank, finding in fabric.watch.race(job.name).look(own, fabric.settings):
            yield Found(rank, (finding,))
        runs = fabric.runs.of_job(job.name)
        late = fabric.watch.saves(job.name).look(now, fabric.settings)
        if late is not None and live and (not runs or any(run.phase is RunPhase.RUNNING for run in runs)):
            yield Found(min(rank for rank, _ in live), (late,))
        if not runs:
            active = [(rank, pulse) for rank, pulse in live if pulse.beat is not None and not pulse.beat.paused]
            stands = [_told(rank, pulse, fabric.settings) for rank, pulse in active]
            one = len({rank.replica for rank, _ in live}) == 1  # ranks of several replicas have the same numbers
            away = any(_away(fabric, pulse, now) for _, pulse in ranks)  # for whom the others may well wait
            case = fabric.watch.case(job.name)
            found = case.look(stands, fabric.settings, now, fabric.beat_seconds())
            yield JobDue(job.name, found if one and not away else None)


def _away(fabric: Fabric, pulse: Pulse, now: float) -> bool:
    """Whether nothing is heard of a rank that should be there. It is missed, and told, soon enough."""
    return not pulse.over and (pulse.missing or now - pulse.heard > NEWS * fabric.beat_seconds())


def _statuses(fabric: Fabric, run: Run) -> Iterator[tuple[str, RankStatus]]:
    for node in run.nodes:
        seen = fabric.watch.nodes.get(node)
        for status in seen.beat.attempts if seen is not None else ():
            if status.job == run.job and status.attempt == run.attempt:
                yield from ((node, rank) for rank in status.ranks if rank.state == "running")


def _seen(fabric: Fabric, run: Run, status: RankStatus, speaks: bool) -> Stand | None:
    """By its agent, which may have fallen silent since, and in its own beats."""
    rank = run.rank(status.rank)
    pulse = fabric.watch.pulses.get(rank)
    if pulse is None or pulse.beat is None or pulse.incarnation != status.incarnation:
        # Nothing is known of its steps; but whoever it is can be stopped.
        return Stand(
            rank=status.rank, step=status.step, still=0.0, frozen=status.frozen, started=False, limit=float("inf")
        )
    if pulse.beat.paused:
        return None
    known = fabric.ranks.get(rank)
    return _told(rank, pulse, fabric.settings)._replace(
        step=max(pulse.beat.step, status.step),
        still=status.still if status.step >= pulse.beat.step else pulse.beat.still,
        frozen=status.frozen,
        held=status.held,
        computes=status.computes,
        # Where its agent sees it, what it said last may be long over: one that holds its interpreter says nothing new.
        phase=_phase(status.phase if status.step else status.phase or pulse.beat.phase),
        # Presumed, because it is silent; but an agent that speaks sees it run.
        dead=known is not None and known.presence is Presence.DEAD and not speaks,
    )


def _told(rank: RankId, pulse: Pulse, settings: Settings) -> Stand:
    assert pulse.beat is not None
    return Stand(
        rank=rank.rank,
        step=pulse.beat.step,
        still=pulse.beat.still,
        phase=_phase(pulse.beat.phase),
        collectives=pulse.beat.collectives,
        limit=pulse.senses.pace.limit(settings),
        started=pulse.senses.pace.started,
        pause=pulse.senses.pace.pause,
        usual=pulse.senses.pace.p99,
    )


def _phase(name: str) -> str:
    """Waiting for data is part of training: a loader that never gives another batch is a hang."""
    return "" if name == "data" else name
