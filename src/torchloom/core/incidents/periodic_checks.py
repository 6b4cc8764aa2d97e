"""Periodic checks of all ranks, job by job. The engine runs them before it decides.

Detectors change when they are asked, so they are no part of `decide`: their findings are put into events that are.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, islice

from torchloom.core.detect.hang import NEWS, HangDiagnosis, RankProgress, is_late
from torchloom.core.events import Event, FindingsMade, JobDue, RanksSilent
from torchloom.core.state.cluster import ClusterState
from torchloom.core.state.rank_states import JobPhase, Presence
from torchloom.core.state.run_states import Run, RunPhase
from torchloom.core.state.runtime import RankRuntime
from torchloom.core.torchft.replica_groups import siblings
from torchloom.protocol.ids import RankId
from torchloom.protocol.node import RankStatus
from torchloom.protocol.phrase import phrase
from torchloom.settings import Settings

SLICE = 250
"""Ranks that are looked at in one go: about a millisecond."""
MAX_REPLICA = 10_000
"""Ranks of one replica at most, where those of several are numbered together."""


def hang_of_run(cluster: ClusterState, job: str, now: float) -> HangDiagnosis | None:
    """Whether ranks of a run make no step, with what their agents see of them.

    The replicas of a job wait for each other: only together do they show who is to blame. Where nobody stands out
    torchft itself gives up waiting, after its own time.
    """
    run = cluster.runs.active(job)
    if run is None or run.phase is not RunPhase.RUNNING:
        return None
    runs = [run] if run.task.torchft is None else [run, *siblings(cluster, run)]
    group = sorted((other for other in runs if other.phase is RunPhase.RUNNING), key=lambda other: other.name)
    ranks: list[RankProgress] = []
    for place, other in enumerate(group):  # ranks of several replicas have the same numbers
        ranks += _list_progress(cluster, other, place * MAX_REPLICA, now)
    tracker = cluster.runtime.hang_tracker(job, tuple((other.name, other.attempt) for other in group))
    diagnosis = tracker.look(ranks, cluster.settings, now, cluster.beat_seconds())
    if diagnosis is not None and run.task.torchft is not None:
        diagnosis = _blame_replica(diagnosis, run, group.index(run) * MAX_REPLICA)
    for number in diagnosis.culprits if diagnosis is not None and diagnosis.kind == "frozen" else ():
        rank_runtime = cluster.runtime.ranks.get(run.rank(number))
        if rank_runtime is not None:
            rank_runtime.detectors.excuse()  # what somebody stopped is no measure of its steps
    return diagnosis


def _blame_replica(diagnosis: HangDiagnosis, run: Run, base: int) -> HangDiagnosis | None:
    """What a diagnosis of all replicas of a job says about one, whose ranks are numbered from `base`."""
    mine = tuple(number - base for number in diagnosis.culprits if base <= number < base + MAX_REPLICA)
    if not mine:
        return None
    why = [phrase("replica_makes_no_step", replica=run.replica_id.replica, lasted=diagnosis.seconds)]
    if others := len({number // MAX_REPLICA for number in diagnosis.waiting}):
        why.append(phrase("replicas_wait_for_it", count=others))
    return diagnosis._replace(culprits=mine, waiting=(), why=tuple(why))


def _list_progress(cluster: ClusterState, run: Run, base: int, now: float) -> Iterator[RankProgress]:
    """Of the ranks that run and are not paused, numbered from `base`."""
    for node in run.nodes:
        status = cluster.runtime.attempt_status(node, run)
        speaks = cluster.runtime.node_speaks(node, now)
        for rank in status.ranks if status is not None else ():
            progress = _combine_reports(cluster, run, rank, base, speaks) if rank.state == "running" else None
            if progress is not None:
                yield progress


def look_around(cluster: ClusterState, now: float) -> Iterator[tuple[Event, ...]]:
    """Once in a while, at every rank: silence, ranks slower than their peers, late checkpoints, hangs of others' jobs.

    Each step looks at SLICE ranks at most and yields its findings as events. Anything may happen between two steps.
    """
    everyone = chain.from_iterable(tuple(cluster.ranks.ids_of(job)) for job in cluster.ranks.job_names())
    job: _JobPass | None = None
    while ranks := tuple(islice(everyone, SLICE)):
        events: list[Event] = []
        silent = cluster.runtime.silent(ranks, now, cluster.beat_seconds())
        if silent:
            events.append(RanksSilent(tuple(silent)))
        for rank in ranks:
            if job is None or job.name != rank.job:
                events += job.conclude() if job is not None else ()
                job = _JobPass(cluster, rank.job, now)
            job.add(rank)
        yield tuple(events)
    if job is not None:
        yield tuple(job.conclude())


class _JobPass:
    """The ranks of one job, as one pass finds them."""

    def __init__(self, cluster: ClusterState, name: str, now: float) -> None:
        self.name = name
        self._cluster = cluster
        self._now = now
        self._runs = cluster.runs.of_job(name)
        self._case = cluster.runtime.hang_tracker(name) if not self._runs and self._is_running() else None
        """Of its hangs. Those of runs are looked at when an agent speaks, and by time (`hang_of_run`)."""
        self._live: dict[RankId, RankRuntime] = {}
        self._stands: list[RankProgress] = []
        self._suspect = False
        """One of them may be too long at its step."""
        self._away = False
        """One of them is silent, and the others may well wait for it. It is soon reported as lost."""
        self._news = NEWS * cluster.beat_seconds()

    def _is_running(self) -> bool:
        job = self._cluster.jobs.get(self.name)
        return job is not None and job.phase is JobPhase.RUNNING

    def add(self, rank: RankId) -> None:
        rank_runtime = self._cluster.runtime.ranks.get(rank)
        if rank_runtime is None or rank_runtime.over:
            return
        self._away = self._away or rank_runtime.missing or self._now - rank_runtime.heard > self._news
        if rank_runtime.missing or rank_runtime.beat is None:
            return
        self._live[rank] = rank_runtime
        if self._case is not None and not rank_runtime.beat.paused:
            settings = self._cluster.settings
            progress = self._case.fair(_read_progress(rank, rank_runtime, settings), self._now)
            self._stands.append(progress)
            self._suspect = self._suspect or is_late(progress, settings)

    def conclude(self) -> Iterator[Event]:
        cluster, now, live = self._cluster, self._now, self._live
        checkpoint_detector = cluster.runtime.checkpoint_detector(self.name)
        if not self._is_running():
            checkpoint_detector.look(now, cluster.settings, trains=False)
            return
        own = {rank: rank_runtime.detectors.own for rank, rank_runtime in live.items()}
        for rank, finding in cluster.runtime.straggler_detector(self.name).look(own, cluster.settings):
            yield FindingsMade(rank, (finding,))
        moves = any(rank_runtime.beat is not None and not rank_runtime.beat.paused for rank_runtime in live.values())
        trains = moves and (not self._runs or any(run.phase is RunPhase.RUNNING for run in self._runs))
        starts = bool(live) and not any(rank_runtime.detectors.pace.steps for rank_runtime in live.values())
        late = checkpoint_detector.look(now, cluster.settings, trains=trains, starts=starts)
        if late is not None:
            yield FindingsMade(min(live), (late,))
        if self._case is not None:
            one = len({rank.replica for rank in live}) == 1  # ranks of several replicas have the same numbers
            diagnosis = self._case.judge(self._stands, cluster.settings, now, cluster.beat_seconds(), self._suspect)
            yield JobDue(self.name, diagnosis if one and not self._away else None)


def _combine_reports(
    cluster: ClusterState, run: Run, status: RankStatus, base: int, speaks: bool
) -> RankProgress | None:
    """By its agent, which may have fallen silent since, and in its own beats."""
    rank = run.rank(status.rank)
    rank_runtime = cluster.runtime.ranks.get(rank)
    if rank_runtime is None or rank_runtime.beat is None or rank_runtime.incarnation != status.incarnation:
        # Its steps are unknown, but its process can still be stopped.
        return RankProgress(
            rank=base + status.rank,
            step=status.step,
            idle_seconds=0.0,
            frozen=status.frozen,
            started=False,
            limit=float("inf"),
        )
    if rank_runtime.beat.paused:
        return None
    member = cluster.ranks.get(rank)
    return _read_progress(rank, rank_runtime, cluster.settings)._replace(
        rank=base + status.rank,
        step=max(rank_runtime.beat.step, status.step),
        idle_seconds=status.idle_seconds if status.step >= rank_runtime.beat.step else rank_runtime.beat.idle_seconds,
        frozen=status.frozen,
        held=status.held,
        computes=status.computes,
        # Where its agent sees it, its last beat may be outdated: a rank whose interpreter is held sends none.
        phase=status.phase if status.step else status.phase or rank_runtime.beat.phase,
        # Presumed, because it is silent; but an agent that speaks sees it run.
        dead=member is not None and member.presence is Presence.DEAD and not speaks,
    )


def _read_progress(rank: RankId, rank_runtime: RankRuntime, settings: Settings) -> RankProgress:
    assert rank_runtime.beat is not None
    return RankProgress(
        rank=rank.rank,
        step=rank_runtime.beat.step,
        idle_seconds=rank_runtime.beat.idle_seconds,
        phase=rank_runtime.beat.phase,
        collectives=rank_runtime.beat.collectives,
        limit=rank_runtime.detectors.pace.limit(settings),
        started=rank_runtime.detectors.pace.started,
        pause=rank_runtime.detectors.pace.pause,
        usual=rank_runtime.detectors.pace.p99,
    )
