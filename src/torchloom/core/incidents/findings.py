"""From findings to incidents: one for each condition, closed when it is over, and what the policy says about it.

Of ranks that make no step an incident has the stacks of all. Nothing is done on a first suspicion. What an agent or a
rank has told is not added to: a weaver that was away, or heard nothing for a while, has no later news than that.
"""

from __future__ import annotations

from collections.abc import Iterable

from torchloom.core.changes.requests import request_id, steer_unasked
from torchloom.core.decision import NOTHING, Decision, close_incident, merge_decisions, provisional
from torchloom.core.detect.detector import Finding
from torchloom.core.detect.hang import HangDiagnosis, spans
from torchloom.core.detect.kinds_and_responses import HANGS, KINDS
from torchloom.core.incidents.responses import Trouble, inspect, respond
from torchloom.core.incidents.rule_lookup import planned, rule_for
from torchloom.core.incidents.stack_evidence import last_heard, of_agent
from torchloom.core.state.cluster import ClusterState
from torchloom.core.state.incident_history import Incident
from torchloom.core.state.run_states import Run, RunPhase
from torchloom.core.torchft.replica_groups import can_heal
from torchloom.protocol.facts import Inspected
from torchloom.protocol.ids import RankId, ReplicaId
from torchloom.protocol.operator import Steer
from torchloom.protocol.phrase import Phrase, Prose, phrase
from torchloom.protocol.records import About, IncidentAmended, IncidentOpened

MORE_PATIENT = 30.0
"""Factor of the waiting time where a restart has not helped."""
REPLICA_ACT = 30.0
"""Seconds for which a replica may hang while others wait for it: they continue without it, and nothing is lost."""
AGAIN_SECONDS = 5.0
"""So long an agent that has not answered is asked again."""
STACKS_SECONDS = 3.0
"""So long a restart waits for the stacks: the ranks take with them what they hung in."""


def handle_findings(cluster: ClusterState, rank: RankId, findings: Iterable[Finding], now: float) -> Decision:
    """What the beats of a rank have shown."""
    return merge_decisions(_handle(cluster, rank, finding, now) for finding in findings)


def _handle(cluster: ClusterState, rank: RankId, finding: Finding, now: float) -> Decision:
    of_job = KINDS[finding.kind].scope == "job"
    about = About(job=rank.job, part=finding.kind) if of_job else About(rank=rank, part=finding.kind)
    incident = cluster.incidents.find_open(rank.job, about)
    if finding.over:
        return NOTHING if incident is None else Decision((close_incident(incident.id, finding.what),))
    reason = phrase("of_rank", rank=rank.rank, what=finding.what)
    if incident is None:
        return _open(cluster, rank, finding, about, reason, now)
    if not of_job or rank.rank in incident.culprits:
        return NOTHING
    # Another rank of the job has the same trouble.
    return Decision((IncidentAmended(id=incident.id, evidence=(reason,), culprits=(rank.rank,)),))


def _open(cluster: ClusterState, rank: RankId, finding: Finding, about: About, reason: Phrase, now: float) -> Decision:
    run = cluster.runs.of(rank.replica_id)
    rule = rule_for(run.task if run is not None else None, finding.kind)
    opened = IncidentOpened(
        id=provisional(finding.kind, rank),
        what=phrase("of_job", job=rank.job, text=reason),
        about=about,
        job=rank.job,
        culprits=(rank.rank,),
        evidence=finding.evidence,
        decision=planned(*rule.do) if run is not None or rule.do == ("report",) else phrase("not_our_job"),
        kind=finding.kind,
    )
    if run is None or run.phase is not RunPhase.RUNNING:
        return Decision((opened,))
    trouble = Trouble(finding.kind, opened.id, reason, (rank.rank,), finding.step, finding.since)
    return Decision((opened,)) + respond(cluster, run, trouble, now)


# ── hangs ──


def look_at_run(cluster: ClusterState, run: Run, diagnosis: HangDiagnosis | None, now: float) -> Decision:
    """A run under way, of which `diagnosis` is the latest verdict."""
    incident = _open_hang(cluster.incidents_of(run))
    if diagnosis is None:
        return _close_if_over(cluster, incident, cluster.ranks_of(run), now)
    rule = rule_for(run.task, diagnosis.kind)
    after = diagnosis.act_after if rule.after is None else rule.after
    keeps = _can_resume(cluster, run)
    if rule.after is None and not keeps:
        after = max(after, cluster.settings.hang_act_seconds)
    elif rule.after is None and diagnosis.certain and can_heal(cluster, run):
        after = min(after, REPLICA_ACT)
    if _hung_before(cluster, run):
        after *= MORE_PATIENT
    if incident is None:
        decision = phrase("if_it_lasts", seconds=after, policy=planned(*rule.do), keeps=keeps)
        about = About(run=run.name, part=diagnosis.kind)
        opened = _opened(cluster, run.replica_id, about, diagnosis, now, decision)
        return Decision((opened,)) + inspect(cluster, run, opened.id, run.nodes)
    again = NOTHING
    asked = now - incident.opened
    silent = [node for node in run.nodes if node not in incident.stacks_from]
    if 0.5 < asked < AGAIN_SECONDS:
        again = inspect(cluster, run, incident.id, silent)
    if diagnosis.seconds < after or (silent and asked < STACKS_SECONDS):
        return again
    trouble = Trouble(diagnosis.kind, incident.id, _reason(diagnosis), diagnosis.culprits, cluster.furthest(run))
    return again + respond(cluster, run, trouble, now)


def look_at_job(cluster: ClusterState, job: str, diagnosis: HangDiagnosis | None, now: float) -> Decision:
    """A job that others started: its ranks can be asked where they are, and the answer can only be reported."""
    incident = _open_hang(cluster.incidents.open_of(job))
    ranks = cluster.ranks.ids_of(job)
    if diagnosis is None:
        return _close_if_over(cluster, incident, ranks, now)
    if incident is not None:
        return NOTHING
    replica = min((rank.replica for rank in ranks), default="main")
    about = About(job=job, part=diagnosis.kind)
    opened = _opened(cluster, ReplicaId(job, replica), about, diagnosis, now, phrase("not_ours_to_restart"))
    ask = Steer(request=request_id(job, "hangs", now), verb="stacks", job=job, operator="torchLoom")
    return Decision((opened,)) + steer_unasked(cluster, ask, incident=opened.id)


def handle_inspected(cluster: ClusterState, report: Inspected) -> Decision:
    """An agent has looked at its ranks."""
    incident = cluster.incidents.get(report.incident)
    run = cluster.runs.by_name.get(report.job)
    job = run.replica_id.job if run is not None else report.job
    if incident is None or incident.job != job or report.node in incident.stacks_from:
        return NOTHING
    return Decision((IncidentAmended(id=incident.id, evidence=of_agent(report, incident), stacks=report.node),))


def _open_hang(incidents: Iterable[Incident]) -> Incident | None:
    return next((i for i in incidents if i.kind in HANGS), None)


def _hung_before(cluster: ClusterState, run: Run) -> bool:
    """Whether the attempt before was ended for a hang too, and this one has not come further: it may be no hang."""
    before = run.notes[-2] if len(run.notes) > 1 else None
    return before is not None and before.kind in HANGS and before.step >= cluster.furthest(run)


def _can_resume(cluster: ClusterState, run: Run) -> bool:
    """Whether there is, or should be, a checkpoint to resume from: without one a restart loses everything."""
    saved = cluster.checkpoints.of(run.replica_id.job).saved
    return bool(can_heal(cluster, run) or run.task.checkpoint_dir or run.resume or saved)


def _opened(
    cluster: ClusterState, of: ReplicaId, all_of: About, diagnosis: HangDiagnosis, now: float, decision: Prose
) -> IncidentOpened:
    """About the one rank to blame, or about all of them."""
    one = About(rank=RankId(*of, diagnosis.culprits[0]), part=diagnosis.kind) if len(diagnosis.culprits) == 1 else None
    return IncidentOpened(
        id=provisional(diagnosis.kind, of),
        what=phrase("of_job", job=all_of.run or all_of.job, text=_reason(diagnosis)),
        about=one or all_of,
        job=of.job,
        culprits=diagnosis.culprits,
        evidence=(*diagnosis.why, *last_heard(cluster, of, diagnosis.culprits, now)),
        decision=decision,
        reason=phrase("may_go_on_by_itself"),
        kind=diagnosis.kind,
    )


def _reason(diagnosis: HangDiagnosis) -> Phrase:
    if not diagnosis.culprits:
        return phrase("no_rank_stands_out")
    codes = {"frozen": "is_frozen", "held": "is_held", "hang": "hangs"}
    return phrase(codes[diagnosis.kind], ranks=spans(diagnosis.culprits))


def _close_if_over(cluster: ClusterState, incident: Incident | None, ranks: Iterable[RankId], now: float) -> Decision:
    """Over if a step was made since it was reported. A weaver that has just begun to watch sees no hang either."""
    if incident is None:
        return NOTHING
    runtimes = [cluster.runtime.ranks[rank] for rank in ranks]
    heard = [(seen, seen.beat) for seen in runtimes if seen.beat is not None]
    moves = [seen.heard - beat.idle_seconds for seen, beat in heard if not seen.over]
    if now < cluster.runtime.blind_until or max(moves, default=0.0) <= incident.opened:
        return NOTHING
    step = max(beat.step for _, beat in heard)
    return Decision((close_incident(incident.id, phrase("went_on_by_itself", step=step)),))
