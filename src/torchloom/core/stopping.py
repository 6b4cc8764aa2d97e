"""Ending an attempt: for what cause, whether another try follows, and which incident tells of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torchloom.core.decision import Decision
from torchloom.core.fabric import Fabric
from torchloom.core.incidents import Incident
from torchloom.core.policy import ENDING, HANGS, MEANING, rule_for
from torchloom.core.presence import PRESENT
from torchloom.core.runs import Run
from torchloom.messages import (
    AttemptStopping,
    EventKind,
    Halt,
    IncidentAmended,
    IncidentOpened,
    RankDied,
    Record,
    Rollback,
)

Then = Literal["restart", "fail", "cancel", "done"]
LOOP = 2
"""Attempts that fail in the same way without a step forward, after which a further one would be no other."""
AGAIN = MEANING["restart"]
ALONE = "the replica is ended, then started again, while the others go on"
ELSEWHERE = "started again elsewhere; what may still run there is ended when its agent is back"
GIVEN_UP = "all ranks are ended; the job is given up"
"""What an incident says was decided."""


@dataclass(frozen=True)
class Cause:
    """Why all ranks of an attempt are ended."""

    reason: str
    culprit: str = ""
    """What is compared to tell a crash loop; empty if it may well not happen again."""
    then: Then = "restart"
    evidence: tuple[str, ...] = ()
    subject: str = ""
    """The rank it began with."""
    code: int = 1
    blame: bool = True
    """A restart is used up."""
    decision: str = AGAIN
    kind: EventKind | None = None
    incident: str = ""
    """That tells of it already."""
    deaf: tuple[int, ...] = ()
    """Ranks that would not hear that they are to end."""
    rollback: Rollback | None = None
    quiet: bool = False
    """It is as somebody wanted it, and no incident."""


def stop(fabric: Fabric, run: Run, now: float, cause: Cause) -> Decision:
    """End what is left of the attempt; and tell of it, unless it was wanted."""
    step = fabric.furthest(run)
    then, reason = cause.then, cause.reason
    if then == "restart" and cause.blame:
        then, reason = _what_then(run, now, cause, step)
    stopping = AttemptStopping(
        job=run.job,
        attempt=run.attempt,
        reason=reason,
        culprit=cause.culprit,
        step=step,
        then=then,
        code=cause.code,
        counts=cause.blame,
        deaf=cause.deaf,
        rollback=cause.rollback,
        incident=cause.incident,
    )
    records: list[Record] = [stopping]
    if then not in {"cancel", "done"} and not cause.quiet:
        again = ALONE if cause.decision == AGAIN and run.task.torchft is not None else cause.decision
        records += _told(fabric, run, cause, reason, GIVEN_UP if then == "fail" else again)
    halt = halting(fabric, run, cause.deaf)
    return Decision(tuple(records), tasks=tuple((node, halt) for node in run.nodes), reason=f"{run.job}: {reason}")


def halting(fabric: Fabric, run: Run, deaf: tuple[int, ...]) -> Halt:
    return Halt(term=fabric.term, job=run.job, attempt=run.attempt, grace_seconds=run.task.grace_seconds, kill=deaf)


def _what_then(run: Run, now: float, cause: Cause, step: int) -> tuple[Then, str]:
    """Another try, or none: not wanted, the budget is used up, or the same again without a step forward."""
    if cause.kind is not None and not ENDING.intersection(rule_for(run.task, cause.kind).do):
        return "fail", f"{cause.reason}; its policy is not to start again"
    since = now - run.task.window_seconds
    if sum(at >= since for at in run.stops) >= run.task.max_restarts:
        allowed = "1 restart was" if run.task.max_restarts == 1 else f"{run.task.max_restarts} restarts were"
        return "fail", f"{cause.reason}; {allowed} allowed" if run.task.max_restarts else cause.reason
    alike = [note for note in run.notes[-LOOP:-1] if note.culprit == cause.culprit and note.step >= step]
    if cause.culprit and cause.kind not in HANGS and len(alike) >= LOOP - 1:
        return "fail", f"{cause.reason}; the same as before, without a step forward"
    return "restart", cause.reason


def _told(fabric: Fabric, run: Run, cause: Cause, reason: str, decision: str) -> list[Record]:
    """One incident for one failure; that of the rank itself, if there is one already."""
    known = next((rank for rank in fabric.ranks.values() if str(rank.id) == cause.subject), None)
    records: list[Record] = []
    if known is not None and known.presence in PRESENT:
        records.append(RankDied(rank=known.id, incarnation=known.incarnation, reason=reason, confirmed=True))
    incident = cause.incident or (known.incident if known is not None else "")
    if incident:
        amended = IncidentAmended(id=incident, evidence=cause.evidence, decision=decision, reason=reason)
        return [*records, amended]
    subject = cause.subject or f"{run.job}#run"
    for earlier in fabric.incidents_of(run):  # an attempt that failed before all of its ranks ran
        if earlier.subject == subject:
            records.append(
                IncidentAmended(id=earlier.id, outcome=f"the next attempt failed too: {reason}", closed=True)
            )
    opened = IncidentOpened(
        id=fabric.incidents.next_id(),
        what=f"{run.job}: {reason}",
        subject=subject,
        job=run.of.job,
        evidence=cause.evidence,
        decision=decision,
        reason=reason,
        kind=cause.kind or "",
    )
    return [*records, opened]


def of_the_attempt(fabric: Fabric, run: Run) -> list[Incident]:
    """Open incidents that are over with the attempt they arose in: those about its ranks, and its own."""
    return [
        i
        for i in fabric.incidents_of(run)
        if i.subject == f"{run.job}#run"
        or i.subject.startswith(f"{run.of.job}/")
        or i.kind not in {"", "device", "device_warning"}
    ]
