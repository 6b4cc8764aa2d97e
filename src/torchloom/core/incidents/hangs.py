"""Ranks that make no step: an incident with the stacks of all, and, if it lasts, what the policy says.

Nothing is done on a first suspicion. What an agent or a rank has told is not added to: a weaver that was away, or heard
nothing for a while, has no later news than that.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

from torchloom.core.changes.orders import give
from torchloom.core.decision import NOTHING, Decision, merge_decisions
from torchloom.core.detect.hang import HangDiagnosis
from torchloom.core.detect.kinds import HANGS
from torchloom.core.detect.rank_spans import spans
from torchloom.core.incident_ids import provisional
from torchloom.core.incidents.policy import planned, rule_for
from torchloom.core.incidents.responses import Trouble, inspecting, open_of, respond
from torchloom.core.incidents.stack_evidence import last_heard, of_agent
from torchloom.core.state.cluster import ClusterState
from torchloom.core.state.incidents import Incident
from torchloom.core.state.runs import Run
from torchloom.core.state.runtime import RankRuntime
from torchloom.core.torchft.replica_groups import can_heal
from torchloom.protocol.facts import Inspected
from torchloom.protocol.ids import RankId, ReplicaId
from torchloom.protocol.incident_records import About, IncidentAmended, IncidentOpened
from torchloom.protocol.operator import Steer
from torchloom.protocol.phrase import Phrase, Prose, phrase

MORE_PATIENT = 30.0
"""So many times longer is waited where a restart has not helped."""
REPLICA_ACT = 30.0
"""Seconds a replica may hang for whom others wait: they go on at once without it, and nothing is lost."""
AGAIN_SECONDS = 5.0
"""So long an agent that has not answered is asked again."""
REPORT_ONLY = phrase("not_ours_to_restart")


def look_at_run(cluster: ClusterState, run: Run, found: HangDiagnosis | None, now: float) -> Decision:
    """A run under way, of which `found` is the latest verdict."""
    known = open_of(cluster.incidents_of(run), HANGS)
    if found is None:
        return _goes_on(cluster, known, cluster.ranks_of(run), now)
    rule = rule_for(run.task, found.kind)
    after = found.act_after if rule.after is None else rule.after
    keeps = _keeps(cluster, run)
    if rule.after is None and not keeps:
        after = max(after, cluster.settings.hang_act_seconds)
    elif rule.after is None and found.certain and can_heal(cluster, run):
        after = min(after, REPLICA_ACT)
    if _again(cluster, run):
        after *= MORE_PATIENT
    if known is None:
        decision = phrase(
            "if_it_lasts" if keeps else "if_it_lasts_all_is_lost", seconds=after, policy=planned(*rule.do)
        )
        about = About(run=run.name, part=found.kind)
        opened = _opened(cluster, run.replica_id, about, found, now, decision)
        return Decision((opened,), tasks=inspecting(cluster, run, opened.id))
    again = _inspect_again(cluster, run, known, now)
    if found.seconds < after:
        return again
    trouble = Trouble(found.kind, known.id, _reason(found), found.culprits, cluster.furthest(run))
    return merge_decisions([again, respond(cluster, run, trouble, now)])


def look_at_job(cluster: ClusterState, job: str, found: HangDiagnosis | None, now: float) -> Decision:
    """A job that others started: its ranks can be asked where they are, and the answer can only be reported."""
    known = open_of(cluster.incidents.open_of(job), HANGS)
    ranks = cluster.ranks.ids_of(job)
    if found is None:
        return _goes_on(cluster, known, ranks, now)
    if known is not None:
        return NOTHING
    replica = min((rank.replica for rank in ranks), default="main")
    about = About(job=job, part=found.kind)
    opened = _opened(cluster, ReplicaId(job, replica), about, found, now, REPORT_ONLY)
    request = hashlib.sha256(f"{job} hangs {now!r}".encode()).hexdigest()[:32]
    ask = Steer(request=request, verb="stacks", job=job, operator="torchLoom")
    asked = give(cluster, ask, "", incident=opened.id)
    return Decision((opened, *asked.records), asked.commands)


def inspected(cluster: ClusterState, said: Inspected) -> Decision:
    """An agent has looked at its ranks."""
    known = cluster.incidents.get(said.incident)
    run = cluster.runs.by_name.get(said.job)
    job = run.replica_id.job if run is not None else said.job
    if known is None or known.job != job or said.node in known.stacks_from:
        return NOTHING
    amended = IncidentAmended(id=known.id, evidence=of_agent(said, known), stacks=said.node)
    return Decision((amended,))


def _again(cluster: ClusterState, run: Run) -> bool:
    """Whether the attempt before was ended for a hang too, and this one has not come further: it may be no hang."""
    before = run.notes[-2] if len(run.notes) > 1 else None
    return before is not None and before.kind in HANGS and before.step >= cluster.furthest(run)


def _keeps(cluster: ClusterState, run: Run) -> bool:
    """Whether there is, or should be, a checkpoint to go on from: without one a restart loses everything."""
    return bool(
        can_heal(cluster, run)
        or run.task.checkpoint_dir
        or run.resume
        or cluster.checkpoints.of(run.replica_id.job).saved
    )


def _opened(
    cluster: ClusterState, of: ReplicaId, all_of: About, found: HangDiagnosis, now: float, decision: Prose
) -> IncidentOpened:
    """About the one rank to blame, or about all of them."""
    one = About(rank=RankId(*of, found.culprits[0]), part=found.kind) if len(found.culprits) == 1 else None
    return IncidentOpened(
        id=provisional(found.kind, of),
        what=phrase("of_job", job=all_of.run or all_of.job, text=_reason(found)),
        about=one or all_of,
        job=of.job,
        culprits=found.culprits,
        evidence=(*found.why, *last_heard(cluster, of, found.culprits, now)),
        decision=decision,
        reason=phrase("may_go_on_by_itself"),
        kind=found.kind,
    )


def _reason(found: HangDiagnosis) -> Phrase:
    if not found.culprits:
        return phrase("no_rank_stands_out")
    who, one = spans(found.culprits), len(found.culprits) == 1
    match found.kind:
        case "frozen":
            return phrase("rank_is_frozen" if one else "ranks_are_frozen", ranks=who)
        case "held":
            return phrase("rank_is_held" if one else "ranks_are_held", ranks=who)
        case "hang":
            return phrase("rank_hangs" if one else "ranks_hang", ranks=who)


def _goes_on(cluster: ClusterState, known: Incident | None, ranks: Iterable[RankId], now: float) -> Decision:
    if known is None:
        return NOTHING
    runtimes = [cluster.runtime.ranks[rank] for rank in ranks]
    if not _moved_since(cluster, known, runtimes, now):
        return NOTHING
    beats = [rank_runtime.beat for rank_runtime in runtimes]
    step = max((beat.step for beat in beats if beat is not None), default=0)
    amended = IncidentAmended(id=known.id, outcome=phrase("went_on_by_itself", step=step), closed=True)
    return Decision((amended,))


def _moved_since(cluster: ClusterState, known: Incident, ranks: Iterable[RankRuntime], now: float) -> bool:
    """Whether a step was made since it was told of. A weaver that has just begun to watch sees no hang either."""
    made = [
        rank_runtime.heard - rank_runtime.beat.idle_seconds
        for rank_runtime in ranks
        if rank_runtime.beat is not None and not rank_runtime.over
    ]
    return now >= cluster.runtime.blind_until and max(made, default=0.0) > known.opened


def _inspect_again(cluster: ClusterState, run: Run, known: Incident, now: float) -> Decision:
    missing = [node for node in run.nodes if node not in known.stacks_from]
    if not missing or not 0.5 < now - known.opened < AGAIN_SECONDS:
        return NOTHING
    return Decision(tasks=tuple(task for task in inspecting(cluster, run, known.id) if task[0] in missing))
