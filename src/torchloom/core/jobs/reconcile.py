"""Reconciling a run: place it, start it, stop all ranks when one fails, restart from the last checkpoint.

Every function compares the durable state of a run with the latest beat of each agent, and decides what comes next.
Commands to agents are repeated until their beats show the desired state.
"""

from __future__ import annotations

from typing import Literal

from torchloom.core.decision import NOTHING, Decision, close_incident
from torchloom.core.detect.hang import HangDiagnosis
from torchloom.core.detect.kinds_and_responses import HANGS
from torchloom.core.incidents.findings import look_at_run
from torchloom.core.incidents.responses import continue_response
from torchloom.core.jobs import node_health
from torchloom.core.jobs.arrival import arrive
from torchloom.core.jobs.placement import place, prepare
from torchloom.core.jobs.priority import place_in_turn, resume_displaced
from torchloom.core.jobs.release import continue_release
from torchloom.core.jobs.restart_decision import Cause, backoff, halt, stop
from torchloom.core.ranks.lifecycle import record_left
from torchloom.core.state.cluster import ClusterState
from torchloom.core.state.rank_states import PRESENT, JobPhase
from torchloom.core.state.run_states import Run, RunPhase
from torchloom.core.torchft import replica_groups
from torchloom.core.torchft.members import ask_to_leave, was_asked_to_leave
from torchloom.protocol import run_records
from torchloom.protocol.node import Dismiss, Halt, Launch, NodeCommand, RankStatus
from torchloom.protocol.phrase import Prose, phrase
from torchloom.protocol.records import About, JobEnded, Record

SIGNALS = {"SIGHUP": 1, "SIGINT": 2, "SIGQUIT": 3, "SIGABRT": 6, "SIGKILL": 9, "SIGSEGV": 11, "SIGTERM": 15}
"""Numbers of signals: a shell reports 128 plus this number as the exit code."""
AT_EXIT = frozenset({"SIGABRT", "SIGSEGV"})
"""Signals with which a process may end after it has finished its work."""


# ── time and beats ──


def handle_node_beat(cluster: ClusterState, node: str) -> Decision:
    """An agent sent a beat: it may forget attempts that are over, and its silence, if it was reported, is over."""
    beat = cluster.runtime.nodes[node].beat
    tasks: list[tuple[str, NodeCommand]] = []
    for status in beat.attempts:
        run = cluster.runs.by_name.get(status.job)
        last = run is None or run.over or node not in run.nodes
        if run is not None and not run.over and run.attempt <= status.attempt and run.phase is not RunPhase.RELEASED:
            continue
        if all(rank.state == "ended" for rank in status.ranks):
            tasks.append((node, Dismiss(term=cluster.term, job=status.job, attempt=status.attempt, last=last)))
        else:  # of an attempt that is not needed any more
            tasks.append((node, Halt(term=cluster.term, job=status.job, attempt=status.attempt)))
    incident = node_health.silence_incident(cluster, node)
    records = (close_incident(incident.id, phrase("agent_speaks_again")),) if incident is not None else ()
    return Decision((*records, *node_health.record_fitness(cluster, node)), tasks=tuple(tasks))


def reconcile_run(cluster: ClusterState, name: str, hang: HangDiagnosis | None, now: float) -> Decision:
    run = cluster.runs.active(name)
    if run is None:
        return NOTHING
    decision = advance(cluster, run, hang, now)
    return ask_to_leave(cluster, run) if run.drained and not decision else decision


def advance(cluster: ClusterState, run: Run, hang: HangDiagnosis | None, now: float) -> Decision:
    leaving = next((node for node in run.nodes if cluster.runtime.leaves(node)), None)
    if leaving is not None and run.under_way:
        return stop(cluster, run, now, Cause(phrase("node_is_leaving", node=leaving), uses_restart=False))
    if replica_groups.is_unused_lighthouse(cluster, run) and run.phase is not RunPhase.STOPPING:
        if run.under_way:
            return stop(cluster, run, now, Cause(phrase("its_replicas_over"), next_action="done"))
        return end(cluster, run, "cancelled", phrase("its_replicas_over"))
    if run.under_way and (lost := node_health.explain_lost_node(cluster, run, now)):
        return stop(cluster, run, now, Cause(lost, decision=phrase("restarts_elsewhere")))
    match run.phase:
        case RunPhase.SUBMITTED | RunPhase.RESTARTING | RunPhase.RELEASED if node_health.launcher_gone(
            cluster, run, now
        ):
            return end(cluster, run, "failed", phrase("launcher_gone"))
        case RunPhase.SUBMITTED | RunPhase.RESTARTING if replica_groups.is_left_alone(cluster, run):
            return end(cluster, run, "cancelled", phrase("other_replicas_over"))
        case RunPhase.SUBMITTED if not run.arrived:
            return arrive(cluster, run, now)
        case RunPhase.SUBMITTED | RunPhase.RESTARTING:
            return place_in_turn(cluster, run, now)
        case RunPhase.RELEASED:
            return resume_displaced(cluster, run, now)
        case RunPhase.PLACING:
            return _prepare(cluster, run, now)
        case RunPhase.STARTING | RunPhase.RUNNING | RunPhase.PAUSED:
            return _supervise(cluster, run, hang, now)
        case RunPhase.STOPPING:
            return _finish(cluster, run, now)
    return NOTHING


# ── starting ──


def _prepare(cluster: ClusterState, run: Run, now: float) -> Decision:
    """The agent of the first rank reports where ranks meet and which checkpoint they resume from; then all start."""
    first = run.places[0].node
    status = cluster.runtime.attempt_status(first, run)
    if status is None or (not status.port and not status.trouble):
        return Decision(tasks=((first, prepare(cluster, run, run.attempt)),))
    if status.trouble:
        why = phrase("agent_has_trouble", node=first, trouble=status.trouble)
        if status.retry:
            return stop(cluster, run, now, Cause(why, uses_restart=False))
        return stop(cluster, run, now, Cause(why, next_action="fail", code=status.trouble_code))
    host = run.host or cluster.runtime.nodes[first].beat.host
    launched = run.with_fields(status, host=host, port=run.port or status.port)
    heals = replica_groups.heals(cluster, run)
    record = run_records.AttemptLaunched.from_fields(launched, job=run.name, rejected=status.rejected, heals=heals)
    launch = _launch(cluster, launched)
    return Decision((record,), tasks=tuple((node, launch) for node in run.nodes))


def _launch(cluster: ClusterState, run: Run) -> Launch:
    task = replica_groups.with_lighthouse(cluster, run)
    return Launch.from_fields(run, term=cluster.term, job=run.name, task=task)


# ── running ──


def _supervise(cluster: ClusterState, run: Run, hang: HangDiagnosis | None, now: float) -> Decision:
    ranks: dict[int, RankStatus] = {}
    tasks: list[tuple[str, NodeCommand]] = []
    for node in run.nodes:
        if node not in cluster.runtime.nodes:
            return NOTHING  # this weaver has not heard from it yet
        status = cluster.runtime.attempt_status(node, run)
        if status is not None and status.trouble:
            why = phrase("agent_has_trouble", node=node, trouble=status.trouble)
            return stop(cluster, run, now, Cause(why, next_action="fail"))
        if status is None or not status.ranks:
            if run.phase is not RunPhase.STARTING:  # an agent that has forgotten them
                return stop(cluster, run, now, Cause(phrase("agent_forgot_ranks", node=node)))
            tasks.append((node, _launch(cluster, run)))
        else:
            statuses = status.ranks
            if not cluster.runtime.node_speaks(node, now):  # then they speak for themselves
                statuses = node_health.merge_rank_reports(cluster, run, statuses)
            ranks |= {rank.rank: rank for rank in statuses}
    bad = [rank for rank in ranks.values() if rank.state == "ended" and (rank.code != 0 or rank.signal)]
    # A process that was done may still be aborted by what its libraries leave running.
    finished = node_health.finished_ranks(cluster, run) if bad else set()
    failed = [rank for rank in bad if not (rank.signal in AT_EXIT and rank.rank in finished)]
    if failed:
        return _stop_failed(cluster, run, failed, now)
    records: list[Record] = [*_record_left(cluster, run, ranks), *node_health.report_silent_agents(cluster, run, now)]
    if len(ranks) == run.world_size and all(rank.state == "ended" for rank in ranks.values()):
        if run.drained or was_asked_to_leave(cluster, run):
            cause = Cause(phrase("it_is_drained"), uses_restart=False, expected=True)
            return Decision(tuple(records)) + stop(cluster, run, now, cause)
        well = phrase("ranks_ended_well", count=run.world_size)
        return Decision(tuple(records)) + end(cluster, run, "done", well)
    if _begins_alone(cluster, run):
        return stop(cluster, run, now, Cause(phrase("other_replicas_over"), next_action="cancel"))
    running = len(ranks) == run.world_size and all(rank.state != "starting" for rank in ranks.values())
    if run.phase is RunPhase.STARTING and running:
        warm = sum(rank.warm for rank in ranks.values())
        cold = next((rank.why_cold for rank in ranks.values() if rank.why_cold), "")
        records.append(run_records.AttemptRunning(job=run.name, attempt=run.attempt, warm=warm, why_cold=cold))
        records += _close_incidents(cluster, run)
    records += _record_first_steps(cluster, run)
    records += _record_pause(cluster, run)
    seen = Decision(tuple(records), tasks=tuple(tasks))
    if run.phase is RunPhase.STARTING or records:
        return seen
    if run.release is not None and (released := continue_release(cluster, run, run.release, now)):
        return seen + released
    if run.phase is RunPhase.PAUSED:
        return seen
    if run.response is not None:
        over = look_at_run(cluster, run, None, now) if hang is None and run.response.kind in HANGS else NOTHING
        return seen + (over or continue_response(cluster, run, now))
    return seen + look_at_run(cluster, run, hang, now)


def _begins_alone(cluster: ClusterState, run: Run) -> bool:
    """Whether a replica was restarted too late to heal from the others: it would train from the start."""
    counted = len(run.notes) > 1 and run.notes[-2].step > 0  # then its steps are seen
    return counted and not cluster.furthest(run) and replica_groups.is_left_alone(cluster, run)


def _stop_failed(cluster: ClusterState, run: Run, failed: list[RankStatus], now: float) -> Decision:
    """The rank that failed first is the culprit: ranks that lost a peer fail, or are killed, a moment later."""
    first = min(failed, key=lambda rank: (not rank.signal, rank.rank))  # a kill comes before what it led to
    how = phrase("killed_by", signal=first.signal) if first.signal else phrase("exit_code", status=first.code)
    reason = phrase("rank_of_run_failed", rank=first.rank, how=how, error=first.error)
    # A kill from outside may not happen again; every other failure could repeat, on any rank.
    outside = first.signal == "SIGKILL" and not first.cause
    error = str(first.error) if first.cause == "exception" else ""
    failure = run_records.Failure(kind="crash", signal=first.signal, code=first.code, cause=first.cause, error=error)
    code = 128 + SIGNALS.get(first.signal, 0) if first.signal else first.code or 1
    evidence: tuple[Prose, ...] = (first.evidence,) if first.error else (how, first.evidence)
    # Where it heals from peers, they have all that its ranks could save.
    kill_now = tuple(at.rank for at in run.places) if replica_groups.heals(cluster, run) else ()
    cause = Cause(
        reason,
        failure=None if outside else failure,
        evidence=evidence,
        rank=run.rank(first.rank),
        code=code,
        kind="crash",
        kill_now=kill_now,
    )
    return stop(cluster, run, now, cause)


def _record_left(cluster: ClusterState, run: Run, ranks: dict[int, RankStatus]) -> list[Record]:
    """Ranks that ended well, as their agent reports, without a goodbye of their own."""
    records: list[Record] = []
    for status in ranks.values():
        rank = cluster.ranks.find(run.rank(status.rank), status.incarnation)
        if rank is not None and rank.presence in PRESENT and status.state == "ended":
            records += record_left(rank, "finished", phrase("it_had_ended_well"))
    return records


def _record_first_steps(cluster: ClusterState, run: Run) -> list[Record]:
    account = cluster.goodput[run.name]
    if run.phase is not RunPhase.RUNNING or account.stepped or not account.joined:
        return []
    beats = [beat for beat in cluster.last_beats(run) if beat is not None and beat.step > account.first]
    if not beats:
        return []
    seconds = max((beat.step - account.first) * (beat.times.p50 if beat.times else 0.0) for beat in beats)
    return [run_records.AttemptStepped(job=run.name, attempt=run.attempt, seconds=seconds)]


def _record_pause(cluster: ClusterState, run: Run) -> list[Record]:
    """Whether all ranks are paused, if that has changed."""
    held = all(beat is not None and beat.paused for beat in cluster.last_beats(run))
    if held == (run.phase is RunPhase.PAUSED) or run.phase is RunPhase.STARTING:
        return []
    return [run_records.AttemptPaused(job=run.name, attempt=run.attempt, held=held)]


# ── stopping ──


def _finish(cluster: ClusterState, run: Run, now: float) -> Decision:
    """Once all processes of the attempt are gone: the next action that was decided when it was stopped."""
    left: list[str] = []
    for node in run.nodes:
        status = cluster.runtime.attempt_status(node, run)
        busy = status is not None and any(rank.state != "ended" for rank in status.ranks)
        unknown = node not in cluster.runtime.nodes
        if (busy or unknown) and not node_health.node_abandoned(cluster, run, node, now):
            left.append(node)
    if left:
        return halt(cluster, run, left, run.kill_now)
    if run.next_action == "restart":
        wait = backoff(run)
        record = run_records.AttemptEnded(job=run.name, attempt=run.attempt, wait_seconds=wait)
        ended = Decision((*_end_ranks(cluster, run), record))
        # Without a wait the next attempt begins at once: the next tick may be a quarter of a second away.
        return ended if wait else ended + place(cluster, run, now)
    if run.next_action == "release":
        released = run_records.AttemptReleased(job=run.name, attempt=run.attempt)
        dismiss = Dismiss(term=cluster.term, job=run.name, attempt=run.attempt, last=True)
        return Decision((*_end_ranks(cluster, run), released), tasks=tuple((node, dismiss) for node in run.nodes))
    ways: dict[str, Literal["done", "failed", "cancelled"]] = {"cancel": "cancelled", "done": "done"}
    return end(cluster, run, ways.get(run.next_action, "failed"), run.reason)


def _end_ranks(cluster: ClusterState, run: Run) -> list[Record]:
    """Ranks that were stopped with the attempt are not expected back."""
    outcome = phrase("ended_with_its_peers")
    present = [rank for rank in cluster.ranks.of_replica(run.replica_id) if rank.presence in PRESENT]
    return [record for rank in present for record in record_left(rank, "interrupted", outcome)]


def _close_incidents(cluster: ClusterState, run: Run) -> list[Record]:
    """The incidents that led to this attempt are over."""
    before = run.notes[-2] if len(run.notes) > 1 else None
    if before is None or before.stopping is None:
        return []
    if replica_groups.heals(cluster, run):
        outcome = phrase("started_again_to_heal", attempt=run.ordinal)
    elif run.resume_step is not None:
        outcome = phrase("started_again_from_step", step=run.resume_step, attempt=run.ordinal)
    else:
        outcome = phrase("started_again_from_beginning", attempt=run.ordinal)
    if run.world_size < (wanted := run.task.world_size):
        outcome = phrase("with_fewer_ranks", outcome=outcome, count=run.world_size, wanted=wanted)
    own = About(run=run.name)
    lasting = {"", "device", "device_warning"}  # unless they are about the run itself or one of its ranks
    incidents = cluster.incidents_of(run)
    over = [i for i in incidents if i.about == own or i.about.rank is not None or i.kind not in lasting]
    return [close_incident(i.id, outcome) for i in over]


def end(cluster: ClusterState, run: Run, phase: Literal["done", "failed", "cancelled"], reason: Prose) -> Decision:
    records: list[Record] = _end_ranks(cluster, run)
    over = [i for i in cluster.incidents_of(run) if not i.about.node]
    records += [close_incident(i.id, phrase("job_is_over", phase=phase)) for i in over]
    records.append(run_records.RunEnded(job=run.name, phase=phase, reason=reason, step=cluster.furthest(run)))
    name = run.replica_id.job
    job = cluster.jobs.get(name)
    last = cluster.runs.of_job(name) == [run]
    if job is not None and job.phase is JobPhase.RUNNING and last:
        whole, why = replica_groups.job_outcome(cluster, run, phase, reason)
        outcome = {"done": "finished", "failed": "failed", "cancelled": "stopped"}[whole]
        step, loss = cluster.step_of(name), cluster.loss_of(name)
        records.append(JobEnded(job=name, outcome=outcome, reason=why, step=step, loss=loss))
    dismiss = Dismiss(term=cluster.term, job=run.name, attempt=run.attempt, last=True)
    return Decision(tuple(records), tasks=tuple((node, dismiss) for node in run.nodes))
