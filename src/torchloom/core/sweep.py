"""What follows from time alone: graces end, the silent are missed, jobs end, the old is forgotten."""

from __future__ import annotations

from torchloom.core import changes, checkpoints, orders, ranks
from torchloom.core.decision import Decision, together
from torchloom.core.fabric import Fabric, Job
from torchloom.core.presence import JOB_NEXT, PRESENT, JobPhase, JobSign, Presence
from torchloom.messages import IncidentAmended, JobEnded, JobForgotten, RankForgotten, Record


def tick(fabric: Fabric, now: float, thorough: bool) -> Decision:
    decisions = [ranks.grace_over(fabric, fabric.ranks[rank]) for rank in fabric.watch.expired(now)]
    opened = 0
    if thorough:
        for rank in fabric.watch.silent(now, fabric.beat_seconds()):
            missed = ranks.silent(fabric, rank, now, opened)
            opened += missed.opened  # of a rank that is being ended there is nothing to tell
            decisions.append(missed)
        there = [job for job in fabric.jobs.values() if job.phase is JobPhase.RUNNING]
        decisions += [_job(fabric, job, now) for job in there if not fabric.runs.of_job(job.name)]
        decisions.append(_ended_jobs(fabric))
    for course in fabric.watch.courses.by_request.values():
        order = course.id in fabric.ledger.orders
        tended = orders.tend(fabric, course, now) if order else changes.tend(fabric, course, now)
        if not (opened and tended.opened):  # else at the next tick: no two incidents may have one number
            opened += tended.opened
            decisions.append(tended)
    return together(decisions)


def _job(fabric: Fabric, job: Job, now: float) -> Decision:
    members = [fabric.ranks[rank] for rank in fabric.ranks_of_job.get(job.name, ())]
    gone = [rank for rank in members if rank.presence not in PRESENT]
    if len(gone) == len(members) and members:
        if now - max(rank.since for rank in members) < fabric.settings.linger_seconds:
            return Decision()
        over = _job_over(job, [(rank.presence, rank.reason) for rank in gone], len(members))
        troubles = [i for i in fabric.incidents.open_of(job.name) if i.kind]
        closed = [IncidentAmended(id=i.id, outcome="the job ended", closed=True) for i in troubles]
        return Decision((*closed, *over.records), reason=over.reason)
    excess = len(gone) - fabric.settings.keep_gone_ranks
    if excess > 0:
        oldest = sorted(gone, key=lambda rank: (rank.since, rank.id))[:excess]
        forgotten: tuple[Record, ...] = tuple(RankForgotten(rank=rank.id) for rank in oldest)
        return Decision(forgotten, reason=f"{job.name}: {excess} long gone")
    return Decision()


def _job_over(job: Job, ends: list[tuple[Presence, str]], count: int) -> Decision:
    bad = [reason for presence, reason in ends if presence in {Presence.DEAD, Presence.FAILED}]
    if bad:
        sign, why = JobSign.ALL_GONE, f"{len(bad)} of {count} ranks died: {bad[0]}"
    elif any(reason == "interrupted" for _, reason in ends):
        sign, why = JobSign.ALL_LEFT_INTERRUPTED, "interrupted"
    else:
        sign, why = JobSign.ALL_LEFT, f"all {count} ranks finished" if count > 1 else "its rank finished"
    phase = JOB_NEXT[(job.phase, sign)]
    return Decision((JobEnded(job=job.name, outcome=phase.value, reason=why),), reason=f"{job.name}: {why}")


def _ended_jobs(fabric: Fabric) -> Decision:
    ended = [job for job in fabric.jobs.values() if job.phase is not JobPhase.RUNNING]
    excess = len(ended) - fabric.settings.keep_ended_jobs
    if excess <= 0:
        return Decision()
    oldest = sorted(ended, key=lambda job: (job.ended or 0.0, job.name))[:excess]
    records: list[Record] = []
    for job in oldest:
        records += (*checkpoints.forgotten(fabric, job.name), JobForgotten(job=job.name))
    return Decision(tuple(records), reason="ended long ago")
