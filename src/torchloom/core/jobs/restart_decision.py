"""Stopping an attempt: the cause, whether and when another attempt follows, and the incident that reports it."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from torchloom.core.decision import Decision, close_incident, provisional
from torchloom.core.detect.kinds_and_responses import HANGS
from torchloom.core.incidents.rule_lookup import ENDING, planned, rule_for
from torchloom.core.state.cluster import ClusterState
from torchloom.core.state.rank_states import PRESENT
from torchloom.core.state.run_states import Run
from torchloom.protocol.ids import RankId
from torchloom.protocol.job_spec import EventKind
from torchloom.protocol.node import Halt, Rollback
from torchloom.protocol.phrase import Prose, phrase
from torchloom.protocol.records import About, IncidentAmended, IncidentOpened, RankDied, Record
from torchloom.protocol.run_records import AttemptStopping, Failure, NextAction

LOOP = 2
"""Attempts that fail in the same way without progress before the run is given up as a crash loop."""
LONGEST_WAIT = 30.0
"""Seconds before the next attempt: none at first, then more while there is no progress."""


class Cause(msgspec.Struct, frozen=True):
    """Why all ranks of an attempt are stopped."""

    reason: Prose
    failure: Failure | None = None
    """How it failed, to recognise a crash loop; None if it may well not happen again."""
    next_action: NextAction = "restart"
    evidence: tuple[Prose, ...] = ()
    rank: RankId | None = None
    """The rank that failed first."""
    code: int = 1
    uses_restart: bool = True
    """It counts against `max_restarts`."""
    decision: Prose = ""
    """The decision of the incident, if not that all ranks are restarted."""
    kind: EventKind | None = None
    incident: str = ""
    """The incident that reports it already."""
    kill_now: tuple[int, ...] = ()
    """Ranks that are killed at once, because they would not react to a signal."""
    rollback: Rollback | None = None
    expected: bool = False
    """An operator requested it: no incident is opened."""


def stop(cluster: ClusterState, run: Run, now: float, cause: Cause) -> Decision:
    """Stop what is left of the attempt, and report it as an incident, unless it was requested."""
    step = cluster.furthest(run)
    next_action, reason = cause.next_action, cause.reason
    if next_action == "restart" and cause.uses_restart:
        next_action, reason = _choose_next_action(run, now, cause, step)
    records: list[Record] = []
    incident = cause.incident
    if next_action not in {"cancel", "done"} and not cause.expected:
        decision = cause.decision or (planned("restart") if run.task.torchft is None else phrase("replica_restarts"))
        if next_action == "fail":
            decision = phrase("job_given_up")
        records, incident = _record_incident(cluster, run, cause, reason, decision)
    stopping = AttemptStopping.from_fields(
        cause,
        job=run.name,
        attempt=run.attempt,
        reason=reason,
        step=step,
        next_action=next_action,
        counts=cause.uses_restart,
        incident=incident,
    )
    return Decision((*records, stopping)) + halt(cluster, run, run.nodes, cause.kill_now)


def halt(cluster: ClusterState, run: Run, nodes: Iterable[str], kill_now: tuple[int, ...]) -> Decision:
    """The agents of these nodes are to end their ranks of the attempt."""
    grace = run.task.grace
    command = Halt(term=cluster.term, job=run.name, attempt=run.attempt, grace_seconds=grace, kill=kill_now)
    return Decision(tasks=tuple((node, command) for node in nodes))


def _choose_next_action(run: Run, now: float, cause: Cause, step: int) -> tuple[NextAction, Prose]:
    """Restart, or give up: by policy, because the restarts are used up, or because of a crash loop."""
    if cause.kind is not None and not ENDING.intersection(rule_for(run.task, cause.kind).do):
        return "fail", phrase("policy_no_restart", reason=cause.reason)
    since = now - run.task.restart_window
    if sum(at >= since for at in run.stops) >= run.task.max_restarts:
        used_up = phrase("restarts_used_up", reason=cause.reason, allowed=run.task.max_restarts)
        return "fail", used_up if run.task.max_restarts else cause.reason
    alike = [note for note in run.notes[-LOOP:-1] if note.failure == cause.failure and note.step >= step]
    if cause.failure is not None and cause.kind not in HANGS and len(alike) >= LOOP - 1:
        return "fail", phrase("crash_loop", reason=cause.reason)
    return "restart", cause.reason


def backoff(run: Run) -> float:
    """Seconds before the next attempt: none after progress; then more each time."""
    idle = 0
    for before, after in zip(reversed(run.notes[:-1]), reversed(run.notes), strict=False):
        if after.step > before.step:
            break
        idle += 1
    return 0.0 if idle == 0 else min(LONGEST_WAIT, 0.5 * 2.0 ** (idle - 1))


def _record_incident(
    cluster: ClusterState, run: Run, cause: Cause, reason: Prose, decision: Prose
) -> tuple[list[Record], str]:
    """One incident for one failure, and its id. The open incident about the rank is used, if there is one."""
    rank = cluster.ranks.get(cause.rank) if cause.rank is not None else None
    records: list[Record] = []
    if rank is not None and rank.presence in PRESENT:
        records.append(RankDied(rank=rank.id, incarnation=rank.incarnation, reason=reason, confirmed=True))
    incident = cause.incident or (rank.incident if rank is not None else "")
    if incident:
        amended = IncidentAmended(id=incident, evidence=cause.evidence, decision=decision, reason=reason)
        return [*records, amended], incident
    about = About(run=run.name) if cause.rank is None else About(rank=cause.rank)
    for earlier in cluster.incidents_of(run):  # an attempt that failed before all of its ranks ran
        if earlier.about == about:
            records.append(close_incident(earlier.id, phrase("next_attempt_failed", reason=reason)))
    opened = IncidentOpened(
        id=provisional("stopped", run.name),
        what=phrase("of_job", job=run.name, text=reason),
        about=about,
        job=run.replica_id.job,
        evidence=cause.evidence,
        decision=decision,
        reason=reason,
        kind=cause.kind or "",
    )
    return [*records, opened], opened.id
