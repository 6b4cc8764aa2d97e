"""Carrying out what a policy says about an incident, one response after the other.

Most are done in the moment they are decided. A checkpoint takes its time: what follows waits for it, but not forever.
The last one may end the attempt (restart, evict, rollback); nothing of a response outlives the attempt it began in.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import msgspec

from torchloom.core.changes.requests import request_id, steer_unasked
from torchloom.core.decision import NOTHING, Decision, merge_decisions, provisional
from torchloom.core.detect.kinds_and_responses import HANGS, KINDS
from torchloom.core.incidents.circuit_breaker import open_reason
from torchloom.core.incidents.rule_lookup import ENDING, planned, rule_for
from torchloom.core.jobs.restart_decision import Cause, stop
from torchloom.core.state.change_ledger import ChangePhase
from torchloom.core.state.cluster import ClusterState
from torchloom.core.state.run_states import Run
from torchloom.protocol.job_spec import EventKind, Response, Rule
from torchloom.protocol.node import Inspect, Rollback
from torchloom.protocol.operator import Steer
from torchloom.protocol.phrase import Phrase, Prose, phrase
from torchloom.protocol.records import About, DeviceMarkedFailed, IncidentAmended, IncidentOpened
from torchloom.protocol.run_records import Failure, ResponseBegan, ResponseWent

CHECKPOINT_SECONDS = 60.0
"""Longest that what follows waits for a checkpoint."""


class Trouble(msgspec.Struct, frozen=True):
    """What is responded to."""

    kind: EventKind
    incident: str
    reason: Prose
    ranks: tuple[int, ...] = ()
    """Who is to blame."""
    step: int = 0
    since: int | None = None
    """The first step at which it may have begun, where that is another one."""


def respond(cluster: ClusterState, run: Run, trouble: Trouble, now: float) -> Decision:
    """Begin what the job's policy says, unless it is only to be reported or may not be done any more."""
    rule = rule_for(run.task, trouble.kind)
    do = tuple(response for response in rule.do if response != "report")
    if not do or run.response is not None:
        return NOTHING
    if why := _why_not(cluster, run, rule, now):
        return _note_once(cluster, trouble, phrase("policy_held_back", why=why, policy=planned(*rule.do)))
    back = _find_rollback(cluster, run, rule, trouble) if "rollback" in do else None
    began = ResponseBegan.from_fields(trouble, job=run.name, do=do, rollback=back)
    amended = IncidentAmended(id=trouble.incident, decision=planned(*rule.do), reason=trouble.reason)
    return Decision((began, amended)) + _next(cluster, run, began, now, now)


def _find_rollback(cluster: ClusterState, run: Run, rule: Rule, trouble: Trouble) -> Rollback:
    """Back to before the first of the steps that may have gone wrong; it is known which was the last.

    The loss of a step shows what the steps before it have made of the parameters. Where the first bad one was reported,
    the step before may have spoilt them: by its gradients, or because the loss of another rank was bad there.
    """
    first = max((trouble.step if trouble.since is None else trouble.since) - 1, 1)
    kept = cluster.checkpoints.of(run.replica_id.job)
    saved = [save.step for save in kept.saved if save.at >= run.submitted]
    resumed = [note.resume_step for note in run.notes if note.resume_step is not None]
    return Rollback(
        before=first,
        back=rule.back,
        skip=(first, trouble.step) if rule.skip else None,
        incident=trouble.incident,
        folder=kept.folder,
        saved=any(step < first for step in (*saved, *resumed)),
    )


def _why_not(cluster: ClusterState, run: Run, rule: Rule, now: float) -> Prose:
    if run.task.dry_run:
        return phrase("policy_dry_run")
    if rule.limit is not None:
        since = now - run.task.restart_window
        if sum(kind == rule.on and at >= since for kind, at in run.responses) >= rule.limit:
            return phrase("policy_limit_reached", limit=rule.limit)
    return open_reason(cluster, now)


def _note_once(cluster: ClusterState, trouble: Trouble, decision: Prose) -> Decision:
    """Once, not each time it is looked at."""
    incident = cluster.incidents.get(trouble.incident)
    if incident is not None and incident.decision == decision:
        return NOTHING
    return Decision((IncidentAmended(id=trouble.incident, decision=decision, reason=trouble.reason),))


def continue_response(cluster: ClusterState, run: Run, now: float) -> Decision:
    """What is left of a response that is under way."""
    if run.response is None:
        return NOTHING
    incident = cluster.incidents.get(run.response.incident)
    if incident is None or incident.closed is not None:  # it went away while a checkpoint was waited for
        return Decision((ResponseWent(job=run.name),))
    return _next(cluster, run, run.response, run.responding, now)


def _next(cluster: ClusterState, run: Run, response: ResponseBegan, since: float, now: float) -> Decision:
    decisions: list[Decision] = []
    left = response.do
    while left and (done := _do(cluster, run, response, left[0], since, now)) is not None:
        decisions.append(done)
        if left[0] in ENDING:
            return merge_decisions(decisions)
        left = left[1:]
    if left != response.do:
        decisions.append(Decision((ResponseWent(job=run.name, left=left),)))
    elif left:  # not done yet; requested until it is under way: another change may be just now
        decisions.append(_steer(cluster, run, "checkpoint", since))
    return merge_decisions(decisions)


def _do(
    cluster: ClusterState, run: Run, response: ResponseBegan, what: Response, since: float, now: float
) -> Decision | None:
    """Done, or None if it is still to be waited for."""
    match what:
        case "stacks":
            return inspect(cluster, run, response.incident, run.nodes)
        case "pause":
            return _steer(cluster, run, "pause", since)
        case "checkpoint":
            over = _checkpoint_outcome(cluster, run, since, now)
            return None if over is None else Decision((IncidentAmended(id=response.incident, evidence=(over,)),))
        case "drain":
            return _drain(cluster, run, response)
        case "restart" | "evict" | "rollback":
            return _end(cluster, run, response, what, now)
    return NOTHING


def _checkpoint_outcome(cluster: ClusterState, run: Run, since: float, now: float) -> Phrase | None:
    """Of the checkpoint that was requested; None while it is waited for."""
    if run.replica_id.job not in cluster.ledger.checkpointers:
        return phrase("checkpoint_not_possible")
    change = cluster.ledger.change_of(request_id(run.name, since, "checkpoint"))
    if change is not None and change.phase in {ChangePhase.SETTLED, ChangePhase.ABORTED}:
        return phrase("checkpoint_asked_for", outcome=change.outcome)
    return phrase("checkpoint_did_not_come", seconds=CHECKPOINT_SECONDS) if now - since > CHECKPOINT_SECONDS else None


def _steer(cluster: ClusterState, run: Run, verb: Literal["pause", "checkpoint"], since: float) -> Decision:
    """There is one response of a run at a time, and `since` is when it began."""
    request = request_id(run.name, since, verb)
    return steer_unasked(cluster, Steer(request=request, verb=verb, job=run.replica_id.job, operator="policy"))


def _drain(cluster: ClusterState, run: Run, response: ResponseBegan) -> Decision:
    """Its devices get no ranks until someone says that they are well again."""
    replicas_on = cluster.drmap.replicas_on
    marks = [
        DeviceMarkedFailed(device=device, cause=response.reason, source="policy", replicas=replicas_on(device))
        for device in _working_devices(cluster, run, response)
    ]
    return Decision(tuple(marks))


def _working_devices(cluster: ClusterState, run: Run, response: ResponseBegan) -> list[str]:
    """The devices of the ranks to blame, without those that have failed already."""
    if response.kind == "device":  # it is marked, and the other jobs on it respond too
        return []
    devices = dict.fromkeys(at.device for at in run.places if at.rank in response.ranks)
    return [device for device in devices if device in cluster.devices and not cluster.devices[device].failed]


def _evict_others(cluster: ClusterState, run: Run, response: ResponseBegan, now: float) -> Decision:
    """The other jobs on devices that get no more ranks: each does what its policy says about a device that failed."""
    devices = _working_devices(cluster, run, response)
    decisions: list[Decision] = []
    for other in cluster.runs.by_name.values():
        on_it = {at.rank: at.device for at in other.places if at.device in devices}
        of_device = response.kind == "device_warning"  # each job on the device responds to that itself
        leaves = of_device and ENDING.intersection(rule_for(other.task, response.kind).do)
        if other.name == run.name or not other.under_way or not on_it or leaves:
            continue
        opened = IncidentOpened(
            id=provisional("evicted", other.name),
            what=phrase("device_evicted", device=min(on_it.values()), job=run.name),
            about=About(run=other.name),
            job=other.replica_id.job,
            reason=response.reason,
            kind="device",
        )
        trouble = Trouble("device", opened.id, opened.what, tuple(on_it), cluster.furthest(other))
        decisions.append(Decision((opened,)) + respond(cluster, other, trouble, now))
    return merge_decisions(decisions)


def _end(cluster: ClusterState, run: Run, response: ResponseBegan, what: Response, now: float) -> Decision:
    drained = NOTHING
    if what == "evict":
        drained = _drain(cluster, run, response) + _evict_others(cluster, run, response, now)
    alone = run.rank(response.ranks[0]) if len(response.ranks) == 1 else None
    cause = Cause(
        reason=response.reason,
        failure=Failure(kind=response.kind, ranks=response.ranks),
        decision="" if what == "restart" else planned(what),
        kind=response.kind,
        incident=response.incident,
        kill_now=response.ranks if response.kind in HANGS else (),
        rollback=response.rollback if what == "rollback" else None,
        rank=alone if response.kind in {"frozen", "held"} else None,
        uses_restart=response.kind not in KINDS or KINDS[response.kind].uses_restart,
    )
    return drained + stop(cluster, run, now, cause)


def inspect(cluster: ClusterState, run: Run, incident: str, nodes: Iterable[str]) -> Decision:
    """The agents of these nodes are to look at the ranks of the run."""
    command = Inspect(term=cluster.term, job=run.name, attempt=run.attempt, incident=incident)
    return Decision(tasks=tuple((node, command) for node in nodes))
