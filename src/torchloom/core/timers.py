"""What follows from time alone: graces end, silent ranks are lost, jobs end, old ones are forgotten."""

from __future__ import annotations

from torchloom.core.changes import requests, two_phase_commit
from torchloom.core.decision import NOTHING, Decision, close_incident, merge_decisions
from torchloom.core.ranks import checkpoint_reports, lifecycle
from torchloom.core.state.cluster import ClusterState, Job, life_over
from torchloom.core.state.rank_states import JOB_NEXT, PRESENT, JobPhase, JobSign, Presence, Rank
from torchloom.protocol.phrase import phrase
from torchloom.protocol.records import JobEnded, JobForgotten, RankForgotten, Record


def tick(cluster: ClusterState, now: float) -> Decision:
    decisions = [lifecycle.presume_dead(cluster, cluster.ranks[rank]) for rank in cluster.runtime.expired(now)]
    running = [job for job in cluster.jobs.values() if job.phase is JobPhase.RUNNING]
    decisions += [_check_job(cluster, job, now) for job in running if not cluster.runs.of_job(job.name)]
    decisions.append(_forget_ended_jobs(cluster))
    for operation in cluster.runtime.operations.by_request.values():
        poll = requests.poll_order if operation.id in cluster.ledger.orders else two_phase_commit.poll
        decisions.append(poll(cluster, operation, now))
    return merge_decisions(decisions)


def _check_job(cluster: ClusterState, job: Job, now: float) -> Decision:
    present = cluster.ranks.present[job.name]
    if present and len(cluster.ranks.ids_of(job.name)) - present <= cluster.settings.keep_gone_ranks:
        return NOTHING  # as mostly: the ranks of a large job are not counted four times a second
    members = cluster.ranks.of_job(job.name)
    gone = [rank for rank in members if rank.presence not in PRESENT]
    if len(gone) == len(members) and members:
        lingers = now - max(rank.since for rank in members) < cluster.settings.linger_seconds
        return NOTHING if lingers else _end_job(cluster, job, gone)
    oldest_first = sorted(gone, key=lambda rank: (rank.since, rank.id))
    return Decision(tuple(RankForgotten(rank=rank.id) for rank in oldest_first[: -cluster.settings.keep_gone_ranks]))


def _end_job(cluster: ClusterState, job: Job, ranks: list[Rank]) -> Decision:
    count = len(ranks)
    bad = [rank.reason for rank in ranks if rank.presence in {Presence.DEAD, Presence.FAILED}]
    if bad:
        sign, why = JobSign.ALL_GONE, phrase("ranks_died", died=len(bad), count=count, first=bad[0])
    elif any(rank.left == "interrupted" for rank in ranks):
        sign, why = JobSign.ALL_LEFT_INTERRUPTED, life_over("interrupted")
    else:
        sign, why = JobSign.ALL_LEFT, phrase("ranks_finished", count=count)
    step, loss = cluster.step_of(job.name), cluster.loss_of(job.name)
    ended = JobEnded(job=job.name, outcome=JOB_NEXT[(job.phase, sign)].value, reason=why, step=step, loss=loss)
    troubles = [i for i in cluster.incidents.open_of(job.name) if i.kind]
    return Decision((*(close_incident(i.id, phrase("its_job_ended")) for i in troubles), ended))


def _forget_ended_jobs(cluster: ClusterState) -> Decision:
    ended = [job for job in cluster.jobs.values() if job.phase is not JobPhase.RUNNING]
    excess = max(0, len(ended) - cluster.settings.keep_ended_jobs)
    oldest = sorted(ended, key=lambda job: (job.ended or 0.0, job.name))[:excess] if excess else []
    records: list[Record] = []
    for job in oldest:  # no later checkpoint will close the incident about those that failed
        records += checkpoint_reports.close_failure(cluster, job.name, phrase("job_forgotten"))
        records.append(JobForgotten(job=job.name))
    return Decision(tuple(records))
