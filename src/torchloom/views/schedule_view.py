"""Loader scheduling as a viewer sees it: who has which loaders, by which rules, and what other numbers would give."""

from __future__ import annotations

from collections.abc import Mapping

from torchloom.core.scheduling.allocation import allocate
from torchloom.core.scheduling.cluster_loaders import ClusterLoaders
from torchloom.core.scheduling.loader_scheduler import JobSeen, LoaderScheduler
from torchloom.core.scheduling.observation import budgets
from torchloom.core.scheduling.throughput_model import Curve
from torchloom.core.state.cluster import ClusterState
from torchloom.core.state.rank_states import PRESENT, JobPhase
from torchloom.protocol.operator import No
from torchloom.protocol.phrase import phrase
from torchloom.protocol.scheduling import (
    NodeBudget,
    PastAllocation,
    PredictionView,
    ScheduledJob,
    ScheduleScores,
    ScheduleView,
    Throughput,
)

BEYOND = 4
"""Numbers of loaders that a prediction shows beyond those that gain, and beyond the present one."""
MOST_COMPARED = 200
"""Jobs up to which a view says what the policy `ours` would do: it decides about all of them from scratch."""


def schedule(cluster: ClusterState, scheduler: LoaderScheduler, now: float) -> ScheduleView:
    limits = budgets(cluster)
    problem = scheduler.problem(limits, now)
    scores = _scores(scheduler, problem)
    ours = _try_ours(problem) if scheduler.rules.policy != "ours" and len(problem.members) <= MOST_COMPARED else {}
    names = sorted(name for name, job in cluster.jobs.items() if job.phase is JobPhase.RUNNING)
    return ScheduleView(
        rules=cluster.schedule,
        now=now,
        jobs=tuple(_job(cluster, scheduler, name, limits, ours.get(name), now) for name in names),
        nodes=_nodes(cluster, scheduler, limits),
        scores=scores,
        past=tuple(PastAllocation(at=at, record=record) for at, record in scheduler.past),
    )


def predict(cluster: ClusterState, scheduler: LoaderScheduler, name: str, now: float) -> PredictionView | No:
    if name not in cluster.jobs:
        return No(why=phrase("job_unknown", job=name), hint=phrase("see_jobs"))
    job = _job(cluster, scheduler, name, budgets(cluster), None, now)
    seen = scheduler.jobs.get(name)
    if seen is None or not scheduler.is_measured(name):
        return PredictionView(job=job)
    curve, paces = scheduler.curve(name, now), scheduler.paces(name)
    enough = next((w for w in range(1, seen.most + 1) if curve.share(w + 1) - curve.share(w) < 0.005), seen.most)
    most = min(max(enough, seen.held, *paces) + BEYOND, seen.most)
    return PredictionView(
        job=job,
        curve=tuple(_throughput(seen, curve, paces, loaders) for loaders in range(most + 1)),
        rate=curve.rate,
        contention=curve.contention,
        ceiling=curve.ceiling,
    )


def _scores(scheduler: LoaderScheduler, problem: ClusterLoaders) -> ScheduleScores | None:
    if not any(map(scheduler.is_measured, problem.members)):
        return None
    scores, known = problem.scores(), any(member.job.remaining for member in problem.members.values())
    makespan = scores.makespan if known else None
    return ScheduleScores(share=scores.share, samples=scores.samples, log=scores.log, makespan=makespan)


def _try_ours(problem: ClusterLoaders) -> dict[str, int]:
    allocate(problem)
    return problem.allocation()


def _job(
    cluster: ClusterState,
    scheduler: LoaderScheduler,
    name: str,
    limits: Mapping[str, int],
    ours: int | None,
    now: float,
) -> ScheduledJob:
    seen = scheduler.jobs.get(name)
    if seen is None:
        ranks: dict[str, int] = {}
        for rank in cluster.ranks.of_job(name):
            if rank.presence in PRESENT:
                ranks[rank.node] = ranks.get(rank.node, 0) + 1
        return ScheduledJob(job=name, standing="no_loaders", ranks=ranks)
    target = scheduler.moves.target(name)
    throughput = None
    if scheduler.is_measured(name):
        throughput = _throughput(seen, scheduler.curve(name, now), scheduler.paces(name), seen.loaders)
    return ScheduledJob(
        job=name,
        standing=scheduler.standing(seen, limits),
        ranks=dict(seen.ranks),
        loaders=seen.loaders,
        target=target if target != seen.loaders else None,
        requested=seen.requested,
        least=seen.least,
        most=seen.most,
        weight=seen.weight,
        now=throughput,
        ours=ours,
    )


def _throughput(seen: JobSeen, curve: Curve, paces: Mapping[int, float], loaders: int) -> Throughput:
    size = sum(seen.ranks.values())
    measured = paces.get(loaders)
    return Throughput(
        loaders=loaders,
        predicted=size * curve.throughput(loaders),
        error=size * curve.throughput_error(loaders),
        measured=None if measured is None else size * measured,
        share=curve.share(loaders),
    )


def _nodes(cluster: ClusterState, scheduler: LoaderScheduler, limits: Mapping[str, int]) -> tuple[NodeBudget, ...]:
    """Those with a budget, and those where jobs with loaders run."""
    used: dict[str, int] = dict.fromkeys(limits, 0)
    for job in scheduler.jobs.values():
        for node, ranks in job.ranks.items():
            used[node] = used.get(node, 0) + ranks * job.held
    return tuple(
        NodeBudget(node=node, budget=limits.get(node), used=count, is_set=node in cluster.schedule.budgets)
        for node, count in sorted(used.items())
    )
