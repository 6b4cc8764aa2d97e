"""Ranks that make no step: an incident with the stacks of all, and, if it lasts, what the policy says.

Nothing is done on a first suspicion. What an agent or a rank has told is not added to: a weaver that was away, or heard
nothing for a while, has no later news than that.
"""

from __future__ import annotations

from collections.abc import Iterable

from torchloom.core.decision import NOTHING, Decision, together
from torchloom.core.detect.hang import Verdict
from torchloom.core.evidence import FOR_INCIDENT, last_heard, of_agent, seen_on
from torchloom.core.fabric import Fabric
from torchloom.core.grouping import can_heal
from torchloom.core.incidents import Incident
from torchloom.core.orders import give
from torchloom.core.policy import HANGS, rule_for, told
from torchloom.core.responding import Trouble, inspecting, open_of, respond
from torchloom.core.runs import Run
from torchloom.core.watch import Pulse
from torchloom.messages import (
    EventKind,
    IncidentAmended,
    IncidentOpened,
    Inspected,
    RankId,
    ReplicaId,
    Steer,
)

MORE_PATIENT = 30.0
"""So many times longer is waited where a restart has not helped."""
REPLICA_ACT = 30.0
"""Seconds a replica may hang for whom others wait: they go on at once without it, and nothing is lost."""
AGAIN_SECONDS = 5.0
"""So long an agent that has not answered is asked again."""
REPORT_ONLY = "reported; torchLoom did not start this job, and cannot start it again"


def look_at_run(fabric: Fabric, run: Run, found: Verdict | None, now: float) -> Decision:
    """A run under way, of which `found` is the latest verdict."""
    known = open_of(fabric.incidents_of(run), HANGS)
    if found is None:
        return _goes_on(fabric, known, fabric.ranks_of(run), now)
    rule = rule_for(run.task, found.kind)
    after = found.act_after if rule.after is None else rule.after
    keeps = _keeps(fabric, run)
    if rule.after is None and not keeps:
        after = max(after, fabric.settings.hang_act_seconds)
    elif rule.after is None and found.certain and can_heal(fabric, run):
        after = min(after, REPLICA_ACT)
    if _again(fabric, run):
        after *= MORE_PATIENT
    if known is None:
        why = "" if keeps else " (it would begin anew: no checkpoint is known of)"
        opened = _opened(fabric, run.of, run.job, found, now, f"if it lasts {after:.3g} s: {told(rule)}{why}")
        return Decision((opened,), tasks=inspecting(fabric, run, opened.id), reason=opened.what)
    again = _inspect_again(fabric, run, known, now)
    if found.seconds < after:
        return again
    trouble = Trouble(found.kind, known.id, _reason(found), found.culprits, fabric.furthest(run))
    return together([again, respond(fabric, run, trouble, now)])


def look_at_job(fabric: Fabric, job: str, found: Verdict | None, now: float) -> Decision:
    """A job that others started: its ranks can be asked where they are, and the answer can only be reported."""
    known = open_of(fabric.incidents.open_of(job), HANGS)
    ranks = fabric.ranks_of_job.get(job, set())
    if found is None:
        return _goes_on(fabric, known, ranks, now)
    if known is not None:
        return NOTHING
    replica = min((rank.replica for rank in ranks), default="main")
    opened = _opened(fabric, ReplicaId(job, replica), job, found, now, REPORT_ONLY)
    ask = Steer(request=FOR_INCIDENT + opened.id, verb="stacks", job=job, operator="torchLoom")
    asked = give(fabric, ask, "", now)
    return Decision((opened, *asked.records), asked.commands, notes=asked.notes, reason=opened.what)


def inspected(fabric: Fabric, said: Inspected) -> Decision:
    """An agent has looked at its ranks."""
    known = fabric.incidents.get(said.incident)
    run = fabric.runs.by_job.get(said.job)
    job = run.of.job if run is not None else said.job
    if known is None or known.job != job or seen_on(known, said.node):
        return NOTHING
    amended = IncidentAmended(id=known.id, evidence=of_agent(said, known))
    return Decision((amended,), reason=f"{known.id}: stacks from {said.node}")


def _again(fabric: Fabric, run: Run) -> bool:
    """Whether the attempt before was ended for a hang too, and this one has not come further: it may be no hang."""
    before = run.notes[-2] if len(run.notes) > 1 else None
    return before is not None and before.culprit.partition(" ")[0] in HANGS and before.step >= fabric.furthest(run)


def _keeps(fabric: Fabric, run: Run) -> bool:
    """Whether there is, or should be, a checkpoint to go on from: without one a restart loses everything."""
    return bool(can_heal(fabric, run) or run.task.checkpoint_dir or run.resume or fabric.keeping.of(run.of.job).saved)


def _opened(fabric: Fabric, of: ReplicaId, name: str, found: Verdict, now: float, decision: str) -> IncidentOpened:
    one = RankId(*of, found.culprits[0]) if len(found.culprits) == 1 else None
    return IncidentOpened(
        id=fabric.incidents.next_id(),
        what=f"{name}: {_reason(found)}",
        subject=f"{one}#{found.kind}" if one is not None else f"{name}#{found.kind}",
        job=of.job,
        evidence=(*found.why, *last_heard(fabric, of, found.culprits, now)),
        decision=decision,
        reason="it may go on by itself",
        kind=found.kind,
    )


def _reason(found: Verdict) -> str:
    does: dict[EventKind, tuple[str, str]] = {
        "frozen": ("is frozen: its process is stopped", "are frozen: their processes are stopped"),
        "held": ("hangs: its interpreter is held", "hang: their interpreters are held"),
        "hang": ("hangs", "hang"),
    }
    one, many = does[found.kind]
    if not found.culprits:
        return "no rank makes a step, and none stands out"
    names = ", ".join(map(str, found.culprits[:8])) + (" …" if len(found.culprits) > 8 else "")
    return f"rank {names} {one}" if len(found.culprits) == 1 else f"ranks {names} {many}"


def _goes_on(fabric: Fabric, known: Incident | None, ranks: Iterable[RankId], now: float) -> Decision:
    pulses = [fabric.watch.pulses[rank] for rank in ranks]
    if known is None or not _moved_since(fabric, known, pulses, now):
        return NOTHING
    beats = [pulse.beat for pulse in pulses]
    step = max((beat.step for beat in beats if beat is not None), default=0)
    amended = IncidentAmended(id=known.id, outcome=f"it went on by itself; step {step}", closed=True)
    return Decision((amended,), reason=f"{known.subject}: goes on")


def _moved_since(fabric: Fabric, known: Incident, pulses: Iterable[Pulse], now: float) -> bool:
    """Whether a step was made since it was told of. A weaver that has just begun to watch sees no hang either."""
    made = [pulse.heard - pulse.beat.still for pulse in pulses if pulse.beat is not None and not pulse.over]
    return now >= fabric.watch.blind_until and max(made, default=0.0) > known.opened


def _inspect_again(fabric: Fabric, run: Run, known: Incident, now: float) -> Decision:
    missing = [node for node in run.nodes if not seen_on(known, node)]
    if not missing or not 0.5 < now - known.opened < AGAIN_SECONDS:
        return NOTHING
    return Decision(tasks=tuple(task for task in inspecting(fabric, run, known.id) if task[0] in missing))
