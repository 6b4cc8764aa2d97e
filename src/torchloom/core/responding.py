"""Carrying out what a policy says about an incident, one response after the other.

Most are done in the moment they are decided. A checkpoint takes its time: what follows waits for it, but not for ever.
The last one may end the attempt (restart, evict, rollback); nothing of a response outlives the attempt it began in.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass

from torchloom.core import wishes
from torchloom.core.brake import braked
from torchloom.core.decision import NOTHING, Decision, together
from torchloom.core.fabric import Fabric
from torchloom.core.incidents import Incident
from torchloom.core.ledger import ChangePhase
from torchloom.core.policy import ENDING, HANGS, MEANING, rule_for, told
from torchloom.core.rollbacks import rollback
from torchloom.core.runs import Run
from torchloom.core.stopping import Cause, stop
from torchloom.messages import (
    DeviceMarkedFailed,
    EventKind,
    IncidentAmended,
    Inspect,
    Record,
    ResponseBegan,
    ResponseWent,
    Rule,
    Steer,
)

CHECKPOINT_SECONDS = 60.0
"""Longest that what follows waits for a checkpoint."""


@dataclass(frozen=True)
class Trouble:
    """What is responded to."""

    kind: EventKind
    incident: str
    reason: str
    ranks: tuple[int, ...] = ()
    """Who is to blame."""
    step: int = 0
    since: int | None = None
    """The first step at which it may have begun, where that is another one."""


def respond(fabric: Fabric, run: Run, trouble: Trouble, now: float) -> Decision:
    """Begin what the job's policy says, unless it is only to be reported or may not be done any more."""
    rule = rule_for(run.task, trouble.kind)
    do = tuple(response for response in rule.do if response != "report")
    if not do or run.response is not None:
        return NOTHING
    if why := _why_not(fabric, run, rule, now):
        return _only_said(fabric, trouble, f"nothing: {why}; the policy would be: {told(rule)}")
    steps = (trouble.step if trouble.since is None else trouble.since, trouble.step)
    back = rollback(fabric, run, rule, steps, trouble.incident) if "rollback" in do else None
    began = ResponseBegan(
        job=run.job,
        incident=trouble.incident,
        kind=trouble.kind,
        do=do,
        ranks=trouble.ranks,
        reason=trouble.reason,
        step=trouble.step,
        rollback=back,
    )
    amended = IncidentAmended(id=trouble.incident, decision=told(rule), reason=trouble.reason)
    first = Decision((began, amended), reason=f"{run.job}: {trouble.reason}")
    return together([first, _next(fabric, run, began, now, now)])


def _why_not(fabric: Fabric, run: Run, rule: Rule, now: float) -> str:
    if run.task.dry_run:
        return "this is a dry run of the policy"
    if rule.limit is not None:
        since = now - run.task.window_seconds
        if sum(kind == rule.on and at >= since for kind, at in run.responses) >= rule.limit:
            return f"it was done {rule.limit} times already, which is its limit"
    return braked(fabric, now)


def _only_said(fabric: Fabric, trouble: Trouble, decision: str) -> Decision:
    """Once, not each time it is looked at."""
    known = fabric.incidents.get(trouble.incident)
    if known is not None and known.decision == decision:
        return NOTHING
    amended = IncidentAmended(id=trouble.incident, decision=decision, reason=trouble.reason)
    return Decision((amended,), reason=f"{trouble.reason}: {decision}")


def go_on(fabric: Fabric, run: Run, now: float) -> Decision:
    """What is left of a response that is under way."""
    if run.response is None:
        return NOTHING
    known = fabric.incidents.get(run.response.incident)
    if known is None or known.closed is not None:  # it went away while a checkpoint was waited for
        return Decision((ResponseWent(job=run.job),), reason=f"{run.job}: {run.response.reason}: it is over")
    return _next(fabric, run, run.response, run.responding, now)


def _next(fabric: Fabric, run: Run, response: ResponseBegan, since: float, now: float) -> Decision:
    decisions: list[Decision] = []
    left = response.do
    while left and (done := _do(fabric, run, response, left[0], since, now)) is not None:
        decisions.append(done)
        if left[0] in ENDING:
            return together(decisions)
        left = left[1:]
    if left != response.do:
        decisions.append(Decision((ResponseWent(job=run.job, left=left),)))
    elif left:  # not done yet
        decisions.append(_ask_for_checkpoint(fabric, run, response, now))
    return together(decisions)


def _do(fabric: Fabric, run: Run, response: ResponseBegan, what: str, since: float, now: float) -> Decision | None:
    """Done, or None if it is still to be waited for."""
    match what:
        case "stacks":
            return Decision(tasks=inspecting(fabric, run, response.incident))
        case "pause":
            ask = Steer(request=_request(response, what), verb="pause", job=run.of.job, operator="policy")
            return _without_answer(wishes.act(fabric, ask, "", now))
        case "checkpoint":
            return _checkpoint_over(fabric, run, response, since, now)
        case "drain":
            return Decision(_drained(fabric, run, response))
        case "restart" | "evict" | "rollback":
            return _end(fabric, run, response, what, now)
    return NOTHING


def _checkpoint_over(fabric: Fabric, run: Run, response: ResponseBegan, since: float, now: float) -> Decision | None:
    if run.of.job not in fabric.ledger.checkpointers:
        return _noted(response, "a checkpoint could not be asked for: the script has registered no function to save")
    change = fabric.ledger.change_of(_request(response, "checkpoint"))
    if change is not None and change.phase in {ChangePhase.SETTLED, ChangePhase.ABORTED}:
        return _noted(response, f"the checkpoint that was asked for: {change.outcome}")
    if now - since > CHECKPOINT_SECONDS:
        return _noted(response, f"no checkpoint came within {CHECKPOINT_SECONDS:.0f} s of being asked for")
    return None


def _ask_for_checkpoint(fabric: Fabric, run: Run, response: ResponseBegan, now: float) -> Decision:
    """Again and again until it is under way: another change may be just now."""
    request = _request(response, "checkpoint")
    if request in fabric.watch.courses.by_request or fabric.ledger.change_of(request) is not None:
        return NOTHING
    ask = Steer(request=request, verb="checkpoint", job=run.of.job, operator="policy")
    return _without_answer(wishes.act(fabric, ask, "", now))


def _drained(fabric: Fabric, run: Run, response: ResponseBegan) -> tuple[Record, ...]:
    """Its devices get no ranks until someone says that they are well again."""
    devices = dict.fromkeys(at.device for at in run.places if at.rank in response.ranks and at.device)
    return tuple(
        DeviceMarkedFailed(
            device=device, cause=response.reason, source="policy", replicas=fabric.drmap.replicas_on(device)
        )
        for device in devices
        if device in fabric.devices and not fabric.devices[device].failed
    )


def _end(fabric: Fabric, run: Run, response: ResponseBegan, what: str, now: float) -> Decision:
    drained = _drained(fabric, run, response) if what == "evict" else ()
    subject = run.rank(response.ranks[0]) if len(response.ranks) == 1 else None
    cause = Cause(
        reason=response.reason,
        culprit=f"{response.kind} {response.ranks}",
        decision=MEANING[what],
        kind=response.kind,
        incident=response.incident,
        deaf=response.ranks if response.kind in HANGS else (),
        rollback=response.rollback if what == "rollback" else None,
        subject=str(subject) if subject is not None and response.kind in {"frozen", "held"} else "",
        blame=response.kind not in {"device", "device_warning", "straggler"},
    )
    return together([Decision(drained), stop(fabric, run, now, cause)])


def inspecting(fabric: Fabric, run: Run, incident: str) -> tuple[tuple[str, Inspect], ...]:
    """Every agent of the run is to look at its ranks."""
    order = Inspect(term=fabric.term, job=run.job, attempt=run.attempt, incident=incident)
    return tuple((node, order) for node in run.nodes)


def _noted(response: ResponseBegan, text: str) -> Decision:
    return Decision((IncidentAmended(id=response.incident, evidence=(text,)),), reason=text)


def _without_answer(decision: Decision) -> Decision:
    """Nobody has asked."""
    return Decision(decision.records, decision.commands, reason=decision.reason, notes=decision.notes)


def _request(response: ResponseBegan, what: str) -> str:
    return hashlib.sha256(f"{response.job} {response.incident} {what}".encode()).hexdigest()[:32]


def open_of(incidents: Iterable[Incident], kinds: frozenset[str]) -> Incident | None:
    return next((i for i in incidents if i.kind in kinds), None)
