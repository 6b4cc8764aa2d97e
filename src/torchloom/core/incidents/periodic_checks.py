"""What the watch makes of what it has seen, job by job. The engine asks before it has anything decided.

Learning changes what is learnt, so it is no part of `decide`: what comes out of it is put into the events that are.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, islice

from torchloom.core.detect.hang import Stand, Verdict, is_suspect
from torchloom.core.detect.hang_tracker import NEWS
from torchloom.core.events import Event, FellSilent, Found, JobDue
from torchloom.core.state.cluster import Fabric
from torchloom.core.state.presence import JobPhase, Presence
from torchloom.core.state.runs import Run, RunPhase
from torchloom.core.state.runtime import Pulse
from torchloom.core.torchft.replica_groups import siblings
from torchloom.protocol.ids import RankId
from torchloom.protocol.node import RankStatus
from torchloom.protocol.phrase import phrase
from torchloom.settings import Settings

SLICE = 250
"""Ranks that are looked at in one go: about a millisecond."""
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
        case = fabric.watch.case(job, ((job, run.attempt),))
        found = case.look(_stands(fabric, run, now), fabric.settings, now, fabric.beat_seconds())
    for number in found.culprits if found is not None and found.kind == "frozen" else ():
        pulse = fabric.watch.pulses.get(run.rank(number))
        if pulse is not None:
            pulse.senses.excuse()  # what somebody stopped is no measure of its steps
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
    case = fabric.watch.case(run.job, tuple((other.job, other.attempt) for other in group))
    found = case.look(stands, fabric.settings, now, fabric.beat_seconds())
    if found is None:
        return None
    base = group.index(run) * MAX_REPLICA
    mine = tuple(number - base for number in found.culprits if base <= number < base + MAX_REPLICA)
    if not mine:
        return None
    why = [phrase("replica_makes_no_step", replica=run.of.replica, lasted=found.seconds)]
    if others := len({number // MAX_REPLICA for number in found.waiting}):
        why.append(phrase("replica_waits_for_it" if others == 1 else "replicas_wait_for_it", count=others))
    return found._replace(culprits=mine, waiting=(), why=tuple(why))


def _stands(fabric: Fabric, run: Run, now: float) -> list[Stand]:
    return [
        stand
        for node, status in _statuses(fabric, run)
        if (stand := _seen(fabric, run, status, fabric.watch.node_speaks(node, now))) is not None
    ]


def look_around(fabric: Fabric, now: float) -> Iterator[tuple[Event, ...]]:
    """Once in a while, at every rank: silence, ranks slower than their peers, late checkpoints, hangs of others' jobs.

    Each step looks at SLICE ranks at most and says what it has found. Anything may happen between two steps.
    """
    everyone = chain.from_iterable(tuple(fabric.ranks_of_job.get(job, ())) for job in tuple(fabric.ranks_of_job))
    job: _SideBySide | None = None
    while ranks := tuple(islice(everyone, SLICE)):
        events: list[Event] = []
        silent = fabric.watch.silent(ranks, now, fabric.beat_seconds())
        if silent:
            events.append(FellSilent(tuple(silent)))
        for rank in ranks:
            if job is None or job.name != rank.job:
                events += job.conclude() if job is not None else ()
                job = _SideBySide(fabric, rank.job, now)
            job.add(rank)
        yield tuple(events)
    if job is not None:
        yield tuple(job.conclude())


class _SideBySide:
    """The ranks of one job, as one pass finds them."""

    def __init__(self, fabric: Fabric, name: str, now: float) -> None:
        self.name = name
        self._fabric = fabric
        self._now = now
        self._runs = fabric.runs.of_job(name)
        self._case = fabric.watch.case(name) if not self._runs and self._goes_on() else None
        """Of its hangs. Those of runs are looked at when an agent speaks, and by time (`hang_of_run`)."""
        self._live: dict[RankId, Pulse] = {}
        self._stands: list[Stand] = []
        self._suspect = False
        """One of them may be too long at its step."""
        self._away = False
        """Nothing is heard of one, for whom the others may well wait."""

    def _goes_on(self) -> bool:
        job = self._fabric.jobs.get(self.name)
        return job is not None and job.phase is JobPhase.RUNNING

    def add(self, rank: RankId) -> None:
        pulse = self._fabric.watch.pulses.get(rank)
        if pulse is None or pulse.over:
            return
        if self._case is not None:
            self._away = self._away or _away(self._fabric, pulse, self._now)
        if pulse.missing or pulse.beat is None:
            return
        self._live[rank] = pulse
        if self._case is not None and not pulse.beat.paused:
            settings = self._fabric.settings
            stand = self._case.fair(_told(rank, pulse, settings), self._now)
            self._stands.append(stand)
            self._suspect = self._suspect or is_suspect(stand, settings)

    def conclude(self) -> Iterator[Event]:
        fabric, now, live = self._fabric, self._now, self._live
        if not self._goes_on():
            return
        own = {rank: pulse.senses.own for rank, pulse in live.items()}
        for rank, finding in fabric.watch.race(self.name).look(own, fabric.settings):
            yield Found(rank, (finding,))
        moves = any(pulse.beat is not None and not pulse.beat.paused for pulse in live.values())
        trains = moves and (not self._runs or any(run.phase is RunPhase.RUNNING for run in self._runs))
        late = fabric.watch.saves(self.name).look(now, fabric.settings, trains=trains)
        if late is not None:
            yield Found(min(live), (late,))
        if self._case is not None:
            one = len({rank.replica for rank in live}) == 1  # ranks of several replicas have the same numbers
            found = self._case.judge(self._stands, fabric.settings, now, fabric.beat_seconds(), self._suspect)
            yield JobDue(self.name, found if one and not self._away else None)


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
