"""What follows from time alone: graces end, silent ranks are lost, jobs end, old ones are forgotten."""

from __future__ import annotations

from torchloom.core.changes import orders, two_phase_commit
from torchloom.core.decision import NOTHING, Decision, merge_decisions
from torchloom.core.incident_ids import close_incident
from torchloom.core.ranks import checkpoint_reports, lifecycle
from torchloom.core.state.cluster import ClusterState, Job, life_over
from torchloom.core.state.ranks import JOB_NEXT, PRESENT, JobPhase, JobSign, Presence, Rank
from torchloom.protocol.ids import RankId
from torchloom.protocol.phrase import phrase
from torchloom.protocol.records import JobEnded, JobForgotten, RankForgotten, Record


def tick(cluster: ClusterState, now: float) -> Decision:
    decisions = [lifecycle.presume_dead(cluster, cluster.ranks[rank]) for rank in cluster.runtime.expired(now)]
    running = [job for job in cluster.jobs.values() if job.phase is JobPhase.RUNNING]
    decisions += [_check_job(cluster, job, now) for job in running if not cluster.runs.of_job(job.name)]
    decisions.append(_forget_ended_jobs(cluster))
    for operation in cluster.runtime.operations.by_request.values():
        order = operation.id in cluster.ledger.orders
        decisions.append(
            orders.poll(cluster, operation, now) if order else two_phase_commit.poll(cluster, operation, now)
        )
    return merge_decisions(decisions)


def lose_silent(cluster: ClusterState, silent: tuple[RankId, ...], now: float) -> Decision:
    """Silence is checked again, because beats may have arrived since."""
    still_silent = cluster.runtime.silent(silent, now, cluster.beat_seconds())
    return merge_decisions(lifecycle.lose_silent(cluster, rank, now) for rank in still_silent)


def _check_job(cluster: ClusterState, job: Job, now: float) -> Decision:
    present = cluster.ranks.present[job.name]
    if present and len(cluster.ranks.ids_of(job.name)) - present <= cluster.settings.keep_gone_ranks:
        return NOTHING  # as mostly: the ranks of a large job are not counted four times a second
    members = cluster.ranks.of_job(job.name)
    gone = [rank for rank in members if rank.presence not in PRESENT]
    if len(gone) == len(members) and members:
        if now - max(rank.since for rank in members) < cluster.settings.linger_seconds:
            return Decision()
        over = _end_job(job, gone)
        troubles = [i for i in cluster.incidents.open_of(job.name) if i.kind]
        closed = [close_incident(i.id, phrase("its_job_ended")) for i in troubles]
        return Decision((*closed, *over.records))
    excess = len(gone) - cluster.settings.keep_gone_ranks
    if excess > 0:
        oldest = sorted(gone, key=lambda rank: (rank.since, rank.id))[:excess]
        forgotten: tuple[Record, ...] = tuple(RankForgotten(rank=rank.id) for rank in oldest)
        return Decision(forgotten)
    return Decision()


def _end_job(job: Job, ranks: list[Rank]) -> Decision:
    count = len(ranks)
    bad = [rank.reason for rank in ranks if rank.presence in {Presence.DEAD, Presence.FAILED}]
    if bad:
        sign, why = JobSign.ALL_GONE, phrase("ranks_died", died=len(bad), count=count, first=bad[0])
    elif any(rank.left == "interrupted" for rank in ranks):
        sign, why = JobSign.ALL_LEFT_INTERRUPTED, life_over("interrupted")
    else:
        sign, why = JobSign.ALL_LEFT, phrase("ranks_finished" if count > 1 else "its_rank_finished", count=count)
    phase = JOB_NEXT[(job.phase, sign)]
    return Decision((JobEnded(job=job.name, outcome=phase.value, reason=why),))


def _forget_ended_jobs(cluster: ClusterState) -> Decision:
    ended = [job for job in cluster.jobs.values() if job.phase is not JobPhase.RUNNING]
    excess = len(ended) - cluster.settings.keep_ended_jobs
    if excess <= 0:
        return Decision()
    oldest = sorted(ended, key=lambda job: (job.ended or 0.0, job.name))[:excess]
    records: list[Record] = []
    for job in oldest:
        records += (*checkpoint_reports.close_forgotten(cluster, job.name), JobForgotten(job=job.name))
    return Decision(tuple(records))
