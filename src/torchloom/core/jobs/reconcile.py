"""What to do with a run: place it, start it, stop all ranks when one fails, start again from the last checkpoint.

Every function looks at what is durable of a run and at the latest beat of each agent, and says what comes next. Agents
are told again until their beats show that it is so.
"""

from __future__ import annotations

from typing import Literal

from torchloom.core.decision import NOTHING, Decision, together
from torchloom.core.detect.hang import HangDiagnosis
from torchloom.core.detect.kinds import HANGS
from torchloom.core.incidents.hangs import look_at_run
from torchloom.core.incidents.responses import continue_response
from torchloom.core.jobs import node_checks
from torchloom.core.jobs.agent_liveness import (
    as_ranks_say,
    deserted,
    finished,
    given_up,
    lost_node,
    missed,
    silent_agents,
)
from torchloom.core.jobs.attempt_stop import ELSEWHERE, Cause, halting, of_the_attempt, stop
from torchloom.core.jobs.placement import place, prepare
from torchloom.core.state.cluster import ClusterState
from torchloom.core.state.presence import PRESENT, JobPhase
from torchloom.core.state.runs import Run, RunPhase
from torchloom.core.torchft import drain_request
from torchloom.core.torchft.replica_groups import heals, left_alone, served, whole_job, with_lighthouse
from torchloom.protocol.incident_records import IncidentAmended
from torchloom.protocol.node import AttemptStatus, Dismiss, Halt, Launch, NodeCommand, RankStatus
from torchloom.protocol.phrase import Prose, phrase
from torchloom.protocol.records import JobEnded, RankLeft, Record
from torchloom.protocol.run_records import (
    AttemptEnded,
    AttemptLaunched,
    AttemptPaused,
    AttemptRunning,
    Failure,
    RunEnded,
)

SIGNALS = {"SIGHUP": 1, "SIGINT": 2, "SIGQUIT": 3, "SIGABRT": 6, "SIGKILL": 9, "SIGSEGV": 11, "SIGTERM": 15}
"""A shell says 128 and this number of a process that such a signal ended."""
AT_EXIT = frozenset({"SIGABRT", "SIGSEGV"})
"""With which a process may end that has done all it had to."""
UNDER_WAY = frozenset({RunPhase.PLACING, RunPhase.STARTING, RunPhase.RUNNING, RunPhase.PAUSED})
"""Phases in which an attempt counts on its nodes."""
FIRST_WAIT = 0.0
LONGEST_WAIT = 30.0
"""Seconds before the next attempt: none at first, then more while there is no step forward."""


# ── time and beats ──


def heard(cluster: ClusterState, node: str) -> Decision:
    """An agent spoke. What it holds of attempts that are over, it may forget; if it was missed, it is there again."""
    beat = cluster.runtime.nodes[node].beat
    tasks: list[tuple[str, NodeCommand]] = []
    for status in beat.attempts:
        run = cluster.runs.by_job.get(status.job)
        last = run is None or run.over or node not in run.nodes
        if run is not None and not run.over and run.attempt <= status.attempt:
            continue
        if all(rank.state == "ended" for rank in status.ranks):
            tasks.append((node, Dismiss(term=cluster.term, job=status.job, attempt=status.attempt, last=last)))
        else:  # of an attempt that nobody counts on any more
            tasks.append((node, Halt(term=cluster.term, job=status.job, attempt=status.attempt)))
    known = missed(cluster, node)
    records = (
        (IncidentAmended(id=known.id, outcome=phrase("agent_speaks_again"), closed=True),) if known is not None else ()
    )
    return Decision((*records, *node_checks.told(cluster, node)), tasks=tuple(tasks))


def due(cluster: ClusterState, job: str, hang: HangDiagnosis | None, now: float) -> Decision:
    run = cluster.runs.active(job)
    return NOTHING if run is None else advance(cluster, run, hang, now)


def advance(cluster: ClusterState, run: Run, hang: HangDiagnosis | None, now: float) -> Decision:
    leaving = next((node for node in run.nodes if cluster.runtime.leaves(node)), None)
    if leaving is not None and run.phase in UNDER_WAY:
        return stop(cluster, run, now, Cause(phrase("node_is_leaving", node=leaving), blame=False))
    if served(cluster, run) and run.phase is not RunPhase.STOPPING:
        if run.phase in UNDER_WAY:
            return stop(cluster, run, now, Cause(phrase("its_replicas_over"), then="done"))
        return end(cluster, run, "cancelled", phrase("its_replicas_over"))
    match run.phase:
        case RunPhase.SUBMITTED | RunPhase.RESTARTING if run.task.attended and deserted(cluster, run, now):
            return end(cluster, run, "failed", phrase("launcher_gone"))
        case RunPhase.SUBMITTED | RunPhase.RESTARTING if left_alone(cluster, run):
            return end(cluster, run, "cancelled", phrase("other_replicas_over"))
        case RunPhase.SUBMITTED:
            return place(cluster, run, now)
        case RunPhase.RESTARTING:
            return place(cluster, run, now) if now >= run.wait_until else NOTHING
        case RunPhase.PLACING:
            return _prepare(cluster, run, now)
        case RunPhase.STARTING | RunPhase.RUNNING | RunPhase.PAUSED:
            return _watch(cluster, run, hang, now)
        case RunPhase.STOPPING:
            return _finish(cluster, run, now)
    return NOTHING


# ── starting ──


def _prepare(cluster: ClusterState, run: Run, now: float) -> Decision:
    """The agent of the first rank says where ranks meet and what they go on from; then all are told to start."""
    first = run.places[0].node
    if lost := lost_node(cluster, run, now):
        return stop(cluster, run, now, Cause(lost, decision=ELSEWHERE))
    status = _status(cluster, run, first)
    if status is None or (not status.port and not status.trouble):
        return Decision(tasks=((first, prepare(cluster, run)),))
    if status.trouble:
        why = phrase("agent_has_trouble", node=first, trouble=status.trouble)
        return stop(cluster, run, now, Cause(why, then="fail", code=status.trouble_code))
    record = AttemptLaunched(
        job=run.job,
        attempt=run.attempt,
        host=run.host or cluster.runtime.nodes[first].beat.host,
        port=run.port or status.port,
        resume=status.resume,
        resume_step=status.resume_step,
        rejected=status.rejected,
        heals=heals(cluster, run),
    )
    launch = _launch(cluster, run, record)
    return Decision((record,), tasks=tuple((node, launch) for node in run.nodes))


def _launch(cluster: ClusterState, run: Run, at: AttemptLaunched | Run) -> Launch:
    return Launch(
        term=cluster.term,
        job=run.job,
        attempt=run.attempt,
        task=with_lighthouse(cluster, run),
        places=run.places,
        host=at.host,
        port=at.port,
        resume=at.resume,
        resume_step=at.resume_step,
        skip=run.skip,
        ordinal=run.ordinal,
        submitted=run.submitted,
    )


# ── running ──


def _watch(cluster: ClusterState, run: Run, hang: HangDiagnosis | None, now: float) -> Decision:
    if lost := lost_node(cluster, run, now):
        return stop(cluster, run, now, Cause(lost, decision=ELSEWHERE))
    ranks: dict[int, RankStatus] = {}
    tasks: list[tuple[str, NodeCommand]] = []
    for node in run.nodes:
        if node not in cluster.runtime.nodes:
            return NOTHING  # this weaver has not heard from it yet
        status = _status(cluster, run, node)
        if status is not None and status.trouble:
            why = phrase("agent_has_trouble", node=node, trouble=status.trouble)
            return stop(cluster, run, now, Cause(why, then="fail"))
        if status is None or not status.ranks:
            if run.phase is not RunPhase.STARTING:  # an agent that has forgotten them
                return stop(cluster, run, now, Cause(phrase("agent_forgot_ranks", node=node)))
            tasks.append((node, _launch(cluster, run, run)))
        else:
            told = status.ranks
            if not cluster.runtime.node_speaks(node, now):  # then they speak for themselves
                told = as_ranks_say(cluster, run, told)
            ranks |= {rank.rank: rank for rank in told}
    bad = [rank for rank in ranks.values() if rank.state == "ended" and (rank.code != 0 or rank.signal)]
    # A process that was done may still be aborted by what its libraries leave running.
    failed = [rank for rank in bad if not (rank.signal in AT_EXIT and finished(cluster, run, rank.rank))]
    if failed:
        return _failed(cluster, run, failed, now)
    records: list[Record] = [*_left(cluster, run, ranks), *silent_agents(cluster, run, now)]
    if len(ranks) == run.world_size and all(rank.state == "ended" for rank in ranks.values()):
        if run.drained or drain_request.was_asked(cluster, run):
            gone = stop(cluster, run, now, Cause(phrase("it_is_drained"), blame=False, quiet=True))
            return Decision((*records, *gone.records), tasks=gone.tasks)
        well = phrase("all_ranks_ended_well" if run.world_size > 1 else "it_ended_well", count=run.world_size)
        ended = end(cluster, run, "done", well)
        return Decision((*records, *ended.records), tasks=ended.tasks)
    if _begins_alone(cluster, run):
        return stop(cluster, run, now, Cause(phrase("other_replicas_over"), then="cancel"))
    running = len(ranks) == run.world_size and all(rank.state != "starting" for rank in ranks.values())
    if run.phase is RunPhase.STARTING and running:
        warm = sum(rank.warm for rank in ranks.values())
        cold = next((rank.why_cold for rank in ranks.values() if rank.why_cold), "")
        records.append(AttemptRunning(job=run.job, attempt=run.attempt, warm=warm, why_cold=cold))
        records += _recovered(cluster, run)
    records += _held(cluster, run)
    seen = Decision(tuple(records), tasks=tuple(tasks))
    if run.phase is not RunPhase.RUNNING or records:
        return seen
    if run.response is not None:
        over = look_at_run(cluster, run, None, now) if hang is None and run.response.kind in HANGS else NOTHING
        return together([seen, over or continue_response(cluster, run, now)])
    return together([seen, look_at_run(cluster, run, hang, now)])


def _begins_alone(cluster: ClusterState, run: Run) -> bool:
    """A replica that was started again too late to heal from the others: it would do all of it once more."""
    counted = len(run.notes) > 1 and run.notes[-2].step > 0  # then its steps are seen
    return counted and not cluster.furthest(run) and left_alone(cluster, run)


def _failed(cluster: ClusterState, run: Run, failed: list[RankStatus], now: float) -> Decision:
    """Who failed first is the culprit: a rank that lost a peer says so itself, or was killed, a moment later."""
    first = min(failed, key=lambda rank: (not rank.signal, rank.rank))  # a kill comes before what it led to
    rank = run.rank(first.rank)
    how = phrase("killed_by", signal=first.signal) if first.signal else phrase("exit_code", status=first.code)
    reason = phrase("rank_of_run_failed", rank=first.rank, how=how, error=first.error)
    # Who kills from outside may not do so again; every other end could be the same each time, on whatever rank.
    outside = first.signal == "SIGKILL" and not first.cause
    error = first.error if first.cause == "exception" else ""
    failure = Failure(kind="crash", signal=first.signal, code=first.code, cause=first.cause, error=error)
    number = SIGNALS.get(first.signal, 0)
    code = 128 + number if first.signal else first.code or 1
    evidence: tuple[Prose, ...] = (first.evidence,) if first.error else (how, first.evidence)
    deaf = tuple(at.rank for at in run.places) if heals(cluster, run) else ()  # peers have all that they could save
    cause = Cause(
        reason,
        failure=None if outside else failure,
        evidence=evidence,
        rank=rank,
        code=code,
        kind="crash",
        deaf=deaf,
    )
    return stop(cluster, run, now, cause)


def _left(cluster: ClusterState, run: Run, ranks: dict[int, RankStatus]) -> list[Record]:
    """Ranks whose agent saw them end well, and that have not said goodbye themselves."""
    found: list[Record] = []
    for number, status in ranks.items():
        known = cluster.ranks.get(run.rank(number))
        if known is None or known.incarnation != status.incarnation or known.presence not in PRESENT:
            continue
        if status.state == "ended":
            found.append(RankLeft(rank=known.id, incarnation=known.incarnation, how="finished"))
            if known.incident:
                found.append(IncidentAmended(id=known.incident, outcome=phrase("it_had_ended_well"), closed=True))
    return found


def _held(cluster: ClusterState, run: Run) -> list[Record]:
    """Whether all ranks are paused, if that has changed."""
    beats = []
    for at in run.places:
        rank_runtime = cluster.runtime.ranks.get(run.rank(at.rank))
        if rank_runtime is not None and rank_runtime.beat is not None and rank_runtime.incarnation == at.incarnation:
            beats.append(rank_runtime.beat)
    held = len(beats) == len(run.places) and all(beat.paused for beat in beats)
    if held == (run.phase is RunPhase.PAUSED) or run.phase is RunPhase.STARTING:
        return []
    return [AttemptPaused(job=run.job, attempt=run.attempt, held=held)]


def _status(cluster: ClusterState, run: Run, node: str) -> AttemptStatus | None:
    known = cluster.runtime.nodes.get(node)
    if known is None:
        return None
    return next((s for s in known.beat.attempts if s.job == run.job and s.attempt == run.attempt), None)


# ── stopping ──


def _finish(cluster: ClusterState, run: Run, now: float) -> Decision:
    """Once nothing of the attempt is left: what was decided when it was stopped."""
    left: list[str] = []
    for node in run.nodes:
        status = _status(cluster, run, node)
        unknown = node not in cluster.runtime.nodes
        busy = status is not None and any(rank.state != "ended" for rank in status.ranks)
        if (unknown or busy) and not given_up(cluster, run, node, now):
            left.append(node)
    if left:
        halt = halting(cluster, run, run.deaf)
        return Decision(tasks=tuple((node, halt) for node in left))
    if run.then == "restart":
        wait = _wait(run)
        record = AttemptEnded(job=run.job, attempt=run.attempt, wait_seconds=wait)
        ended = Decision((*_gone(cluster, run), record))
        # Without a wait the next one begins in the same breath: the tick that would see to it is far away.
        return ended if wait else together([ended, place(cluster, run, now)])
    ways: dict[str, Literal["done", "failed", "cancelled"]] = {"cancel": "cancelled", "done": "done"}
    return end(cluster, run, ways.get(run.then, "failed"), run.reason)


def _wait(run: Run) -> float:
    """None after a step forward; then more each time."""
    idle = 0
    for before, after in zip(reversed(run.notes[:-1]), reversed(run.notes), strict=False):
        if after.step > before.step:
            break
        idle += 1
    return FIRST_WAIT if idle == 0 else min(LONGEST_WAIT, 0.5 * 2.0 ** (idle - 1))


def _gone(cluster: ClusterState, run: Run) -> list[Record]:
    """Ranks that were ended with the attempt: nobody waits for them to come back."""
    records: list[Record] = []
    for rank in cluster.ranks_of(run):
        known = cluster.ranks[rank]
        if known.presence in PRESENT:
            records.append(RankLeft(rank=rank, incarnation=known.incarnation, how="interrupted"))
            if known.incident:
                records.append(IncidentAmended(id=known.incident, outcome=phrase("ended_with_its_peers"), closed=True))
    return records


def _recovered(cluster: ClusterState, run: Run) -> list[Record]:
    """The incidents that led to this attempt are over."""
    before = run.notes[-2] if len(run.notes) > 1 else None
    if before is None or before.stopping is None:
        return []
    if heals(cluster, run):
        outcome = phrase("started_again_to_heal", attempt=run.ordinal)
    elif run.resume_step is not None:
        outcome = phrase("started_again_from_step", step=run.resume_step, attempt=run.ordinal)
    else:
        outcome = phrase("started_again_from_beginning", attempt=run.ordinal)
    if run.world_size < (wanted := run.task.per_node * run.task.nodes):
        outcome = phrase("with_fewer_ranks", outcome=outcome, count=run.world_size, wanted=wanted)
    return [IncidentAmended(id=i.id, outcome=outcome, closed=True) for i in of_the_attempt(cluster, run)]


def end(cluster: ClusterState, run: Run, phase: Literal["done", "failed", "cancelled"], reason: Prose) -> Decision:
    records: list[Record] = _gone(cluster, run)
    over = [i for i in cluster.incidents_of(run) if not i.about.node]
    records += [IncidentAmended(id=i.id, outcome=phrase("job_is_over", phase=phase), closed=True) for i in over]
    records.append(RunEnded(job=run.job, phase=phase, reason=reason, step=cluster.furthest(run)))
    job = cluster.jobs.get(run.of.job)
    last = cluster.runs.of_job(run.of.job) == [run]
    if job is not None and job.phase is JobPhase.RUNNING and last:
        whole, why = whole_job(cluster, run, phase, reason)
        outcome = {"done": "finished", "failed": "failed", "cancelled": "stopped"}[whole]
        records.append(JobEnded(job=run.of.job, outcome=outcome, reason=why))
    dismiss = Dismiss(term=cluster.term, job=run.job, attempt=run.attempt, last=True)
    return Decision(tuple(records), tasks=tuple((node, dismiss) for node in run.nodes))
