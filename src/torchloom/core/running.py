"""What to do with a run: place it, start it, stop all ranks when one fails, start again from the last checkpoint.

Every function looks at what is durable of a run and at the latest beat of each agent, and says what comes next. Agents
are told again until their beats show that it is so.
"""

from __future__ import annotations

import hashlib
from typing import Literal

from torchloom.core.decision import NOTHING, Decision, together
from torchloom.core.fabric import Fabric, Incident
from torchloom.core.presence import PRESENT, JobPhase
from torchloom.core.runs import REPLICA, Run, RunPhase
from torchloom.messages import (
    AttemptBegan,
    AttemptEnded,
    AttemptLaunched,
    AttemptRunning,
    AttemptStatus,
    AttemptStopping,
    Cancel,
    Dismiss,
    Done,
    Drain,
    Halt,
    IncidentAmended,
    IncidentOpened,
    JobBegan,
    JobEnded,
    Launch,
    No,
    NodeBeat,
    NodeCommand,
    NodeDrained,
    Place,
    Prepare,
    RankDied,
    RankId,
    RankLeft,
    RankStatus,
    Record,
    RunEnded,
    RunSubmitted,
    Submit,
)

SIGNALS = {"SIGHUP": 1, "SIGINT": 2, "SIGQUIT": 3, "SIGABRT": 6, "SIGKILL": 9, "SIGSEGV": 11, "SIGTERM": 15}
"""A shell says 128 and this number of a process that such a signal ended."""
Then = Literal["restart", "fail", "cancel"]
LOOP = 2
"""Attempts that fail in the same way without a step forward, after which a further one would be no other."""
FIRST_WAIT = 0.0
LONGEST_WAIT = 30.0
"""Seconds before the next attempt: none at first, then more while there is no step forward."""


# ── asked ──


def submit(fabric: Fabric, ask: Submit) -> Decision:
    known = fabric.runs.by_job.get(ask.job)
    if known is not None and known.request == ask.request:
        return Decision(answer=Done(text=f"{ask.job} was submitted"))
    if known is not None and not known.over:
        return _no(f"{ask.job} is {known.phase} already", "choose another name, or end it where it was started")
    job = fabric.jobs.get(ask.job)
    members = [fabric.ranks[rank] for rank in fabric.ranks_of_job.get(ask.job, ())]
    if job is not None and job.phase is JobPhase.RUNNING and any(rank.presence in PRESENT for rank in members):
        return _no(f"{ask.job} is running already, started by another launcher", "choose another name")
    if ask.task.node is not None and ask.task.node not in fabric.watch.nodes:
        return _no(f"there is no agent on node {ask.task.node}", f"agents are on: {_known_nodes(fabric)}")
    records: list[Record] = [RunSubmitted(job=ask.job, task=ask.task, request=ask.request, operator=ask.operator)]
    if job is None or job.phase is not JobPhase.RUNNING:
        records.insert(0, JobBegan(job=ask.job))
    return Decision(tuple(records), answer=Done(text=f"{ask.job} is submitted"), reason=f"{ask.job} is submitted")


def cancel(fabric: Fabric, ask: Cancel, now: float) -> Decision:
    run = fabric.runs.by_job.get(ask.job)
    if run is None:
        return _no(f"{ask.job} was not started by torchLoom", f"`loom stop {ask.job}` asks its ranks to end")
    if run.over:
        return Decision(answer=Done(text=f"{ask.job} is {run.phase}"))
    answer = Done(text=f"{ask.job} is being cancelled")
    if run.phase in {RunPhase.SUBMITTED, RunPhase.RESTARTING}:
        ended = _end(fabric, run, "cancelled", ask.why)
        return Decision(ended.records, tasks=ended.tasks, answer=answer, reason=f"{run.job}: {ask.why}")
    if run.phase is RunPhase.STOPPING and run.then == "cancel":
        return Decision(answer=answer)
    stopping = _stop(fabric, run, now, ask.why, then="cancel")
    return Decision(stopping.records, tasks=stopping.tasks, answer=answer, reason=f"{run.job}: {ask.why}")


def drain(fabric: Fabric, ask: Drain) -> Decision:
    known = ask.node in fabric.watch.nodes or ask.node in fabric.runs.drained
    if not known:
        return _no(f"there is no agent on node {ask.node}", f"agents are on: {_known_nodes(fabric)}")
    if (ask.node in fabric.runs.drained) != ask.undo:
        return Decision(answer=Done(text=f"{ask.node} is {'not ' if ask.undo else ''}drained"))
    record = NodeDrained(node=ask.node, drained=not ask.undo, operator=ask.operator)
    text = f"{ask.node} may be used again" if ask.undo else f"nothing more is started on {ask.node}"
    return Decision((record,), answer=Done(text=text), reason=text)


def _known_nodes(fabric: Fabric) -> str:
    return ", ".join(sorted(fabric.watch.nodes)) or "none"


def _no(why: str, hint: str) -> Decision:
    return Decision(answer=No(why=why, hint=hint))


# ── time and beats ──


def heard(fabric: Fabric, node: str, now: float) -> Decision:
    """An agent spoke: whatever concerns it may go on. What it holds of attempts that are over, it may forget."""
    runs = [run for run in fabric.runs.by_job.values() if not run.over and (not run.places or node in run.nodes)]
    return together([*(advance(fabric, run, now) for run in runs), _dismiss(fabric, node)])


def tend(fabric: Fabric, now: float) -> Decision:
    return together(advance(fabric, run, now) for run in fabric.runs.by_job.values() if not run.over)


def _dismiss(fabric: Fabric, node: str) -> Decision:
    beat = fabric.watch.nodes[node].beat
    tasks: list[tuple[str, NodeCommand]] = []
    for status in beat.attempts:
        run = fabric.runs.by_job.get(status.job)
        if run is not None and not run.over and run.attempt <= status.attempt:
            continue
        if all(rank.state == "ended" for rank in status.ranks):
            tasks.append((node, Dismiss(term=fabric.term, job=status.job, attempt=status.attempt)))
        else:  # of an attempt that nobody counts on any more
            tasks.append((node, Halt(term=fabric.term, job=status.job, attempt=status.attempt)))
    return Decision(tasks=tuple(tasks))


def advance(fabric: Fabric, run: Run, now: float) -> Decision:
    match run.phase:
        case RunPhase.SUBMITTED:
            return _place(fabric, run, now)
        case RunPhase.RESTARTING:
            return _place(fabric, run, now) if now >= run.wait_until else NOTHING
        case RunPhase.PLACING:
            return _prepare(fabric, run, now)
        case RunPhase.STARTING | RunPhase.RUNNING:
            return _watch(fabric, run, now)
        case RunPhase.STOPPING:
            return _finish(fabric, run, now)
    return NOTHING


# ── placing ──


def _place(fabric: Fabric, run: Run, now: float) -> Decision:
    """All ranks at once, or none: on nodes that have room, the ones with most first."""
    free = {
        node: _room(fabric, node, beat.beat) for node, beat in fabric.watch.nodes.items() if _usable(fabric, node, now)
    }
    wanted = run.task.per_node
    if run.task.node is not None:
        chosen = [run.task.node] if run.task.node in free else []
    else:
        fitting = [node for node, room in free.items() if room >= wanted]
        chosen = sorted(fitting, key=lambda node: (-free[node], node))[: run.task.nodes]
    if len(chosen) < run.task.nodes:
        return NOTHING
    attempt = run.attempt + 1
    places = tuple(
        Place(
            rank=at * wanted + local,
            local=local,
            node=node,
            incarnation=_life(run.job, attempt, at * wanted + local, now),
        )
        for at, node in enumerate(chosen)
        for local in range(wanted)
    )
    record = AttemptBegan(job=run.job, attempt=attempt, places=places, reason=run.reason)
    prepare = Prepare(term=fabric.term, job=run.job, attempt=attempt, task=run.task)
    return Decision(
        (record,), tasks=((chosen[0], prepare),), reason=f"{run.job}: attempt {attempt} on {', '.join(chosen)}"
    )


def _usable(fabric: Fabric, node: str, now: float) -> bool:
    return node not in fabric.runs.drained and fabric.watch.node_speaks(node, now)


def _room(fabric: Fabric, node: str, beat: NodeBeat) -> int:
    """How many more ranks a node takes: one for each device, or, without any, for each core."""
    places = [run.places for run in fabric.runs.by_job.values() if not run.over]
    used = sum(1 for of_run in places for place in of_run if place.node == node)
    return (len(beat.devices) or beat.cores) - used


def _life(job: str, attempt: int, rank: int, now: float) -> str:
    chance = hashlib.sha256(f"{job} {attempt} {rank} {now!r}".encode()).hexdigest()[:12]
    return f"{int(now * 1000):012x}{chance}"


# ── starting ──


def _prepare(fabric: Fabric, run: Run, now: float) -> Decision:
    """The agent of the first rank says where ranks meet and what they go on from; then all are told to start."""
    first = run.places[0].node
    if lost := _lost_node(fabric, run, now):
        return _stop(fabric, run, now, lost, culprit=lost)
    status = _status(fabric, run, first)
    if status is None or (not status.port and not status.trouble):
        return Decision(tasks=((first, Prepare(term=fabric.term, job=run.job, attempt=run.attempt, task=run.task)),))
    if status.trouble:
        return _stop(fabric, run, now, f"{first}: {status.trouble}", culprit=status.trouble, then="fail")
    record = AttemptLaunched(
        job=run.job,
        attempt=run.attempt,
        host=fabric.watch.nodes[first].beat.host,
        port=status.port,
        resume=status.resume,
        resume_step=status.resume_step,
        rejected=status.rejected,
    )
    launch = _launch(fabric, run, record)
    return Decision((record,), tasks=tuple((node, launch) for node in run.nodes), reason=f"{run.job}: starting")


def _launch(fabric: Fabric, run: Run, at: AttemptLaunched | Run) -> Launch:
    return Launch(
        term=fabric.term,
        job=run.job,
        attempt=run.attempt,
        task=run.task,
        places=run.places,
        host=at.host,
        port=at.port,
        resume=at.resume,
        resume_step=at.resume_step,
    )


# ── running ──


def _watch(fabric: Fabric, run: Run, now: float) -> Decision:
    if lost := _lost_node(fabric, run, now):
        return _stop(fabric, run, now, lost, culprit=lost)
    ranks: dict[int, RankStatus] = {}
    tasks: list[tuple[str, NodeCommand]] = []
    for node in run.nodes:
        if node not in fabric.watch.nodes:
            return NOTHING  # this weaver has not heard from it yet
        status = _status(fabric, run, node)
        if status is not None and status.trouble:
            return _stop(fabric, run, now, f"{node}: {status.trouble}", culprit=status.trouble, then="fail")
        if status is None or not status.ranks:
            if run.phase is RunPhase.RUNNING:  # an agent that has forgotten them
                return _stop(
                    fabric, run, now, f"the agent on {node} no longer knows its ranks", culprit=f"agent {node}"
                )
            tasks.append((node, _launch(fabric, run, run)))
        else:
            ranks |= {rank.rank: rank for rank in status.ranks}
    failed = [rank for rank in ranks.values() if rank.state == "ended" and (rank.code != 0 or rank.signal)]
    if failed:
        return _failed(fabric, run, failed, now)
    records: list[Record] = _left(fabric, run, ranks)
    if len(ranks) == run.world_size and all(rank.state == "ended" for rank in ranks.values()):
        ended = _end(
            fabric, run, "done", f"all {run.world_size} ranks ended well" if run.world_size > 1 else "it ended well"
        )
        return Decision((*records, *ended.records), tasks=ended.tasks, reason=ended.reason)
    running = len(ranks) == run.world_size and all(rank.state != "starting" for rank in ranks.values())
    if run.phase is RunPhase.STARTING and running:
        warm = sum(rank.warm for rank in ranks.values())
        why = next((rank.why_cold for rank in ranks.values() if rank.why_cold), "")
        records.append(AttemptRunning(job=run.job, attempt=run.attempt, warm=warm, why_cold=why))
        records += _recovered(fabric, run)
    return Decision(tuple(records), tasks=tuple(tasks), reason=f"{run.job}: running" if records else "")


def _failed(fabric: Fabric, run: Run, failed: list[RankStatus], now: float) -> Decision:
    """Who failed first is the culprit: a rank that lost a peer says so itself, or was killed, a moment later."""
    first = min(failed, key=lambda rank: (not rank.signal, rank.rank))  # a kill comes before what it led to
    rank = RankId(run.job, REPLICA, first.rank)
    how = f"killed by {first.signal}" if first.signal else f"exit code {first.code}"
    said = first.evidence.strip().splitlines()
    reason = f"rank {first.rank} failed: {how}"
    culprit = f"rank {first.rank}: {how}: {said[-1][:200] if said else ''}"
    number = SIGNALS.get(first.signal, 0)
    code = 128 + number if first.signal else first.code or 1
    return _stop(
        fabric, run, now, reason, culprit=culprit, evidence=(how, first.evidence), subject=str(rank), code=code
    )


def _left(fabric: Fabric, run: Run, ranks: dict[int, RankStatus]) -> list[Record]:
    """Ranks whose agent saw them end well, and that have not said goodbye themselves."""
    found: list[Record] = []
    for number, status in ranks.items():
        known = fabric.ranks.get(RankId(run.job, REPLICA, number))
        if known is None or known.incarnation != status.incarnation or known.presence not in PRESENT:
            continue
        if status.state == "ended":
            found.append(RankLeft(rank=known.id, incarnation=known.incarnation, how="finished"))
            if known.incident:
                found.append(IncidentAmended(id=known.incident, outcome="it had ended well", closed=True))
    return found


def _lost_node(fabric: Fabric, run: Run, now: float) -> str:
    gone = [node for node in run.nodes if not fabric.watch.node_speaks(node, now)]
    return f"the agent on {gone[0]} is silent" if gone else ""


def _status(fabric: Fabric, run: Run, node: str) -> AttemptStatus | None:
    known = fabric.watch.nodes.get(node)
    if known is None:
        return None
    return next((s for s in known.beat.attempts if s.job == run.job and s.attempt == run.attempt), None)


# ── stopping ──


def _stop(
    fabric: Fabric,
    run: Run,
    now: float,
    reason: str,
    culprit: str = "",
    then: Then = "restart",
    evidence: tuple[str, ...] = (),
    subject: str = "",
    code: int = 1,
) -> Decision:
    """End what is left of the attempt; and tell of it, unless it was wanted."""
    step = _furthest(fabric, run)
    if then == "restart":
        then, reason = _what_then(run, now, reason, culprit, step)
    records: list[Record] = [
        AttemptStopping(
            job=run.job, attempt=run.attempt, reason=reason, culprit=culprit, step=step, then=then, code=code
        )
    ]
    if then != "cancel":
        records += _told(fabric, run, reason, then, evidence, subject)
    halt = Halt(term=fabric.term, job=run.job, attempt=run.attempt, grace_seconds=run.task.grace_seconds)
    return Decision(tuple(records), tasks=tuple((node, halt) for node in run.nodes), reason=f"{run.job}: {reason}")


def _furthest(fabric: Fabric, run: Run) -> int:
    pulses = [fabric.watch.pulses.get(rank) for rank in fabric.ranks_of_job.get(run.job, ())]
    steps = [pulse.beat.step for pulse in pulses if pulse is not None and pulse.beat is not None]
    return max([run.resume_step or 0, *steps])


def _what_then(run: Run, now: float, reason: str, culprit: str, step: int) -> tuple[Then, str]:
    """Another try, or none: the budget is used up, or it fails in the same way again without a step forward."""
    since = now - run.task.window_seconds
    restarts = [note for note in run.notes[:-1] if note.stopping is not None and note.stopping >= since]
    if len(restarts) >= run.task.max_restarts:
        allowed = "1 restart was" if run.task.max_restarts == 1 else f"{run.task.max_restarts} restarts were"
        return "fail", f"{reason}; {allowed} allowed" if run.task.max_restarts else reason
    alike = [note for note in run.notes[-LOOP:-1] if note.culprit == culprit and note.step >= step]
    if culprit and len(alike) >= LOOP - 1:
        return "fail", f"{reason}; the same as before, without a step forward"
    return "restart", reason


def _told(fabric: Fabric, run: Run, reason: str, then: str, evidence: tuple[str, ...], subject: str) -> list[Record]:
    """One incident for one failure; that of the rank itself, if there is one already."""
    decision = "all ranks are ended, then started again from the newest valid checkpoint"
    if then == "fail":
        decision = "all ranks are ended; the job is given up"
    known = next((rank for rank in fabric.ranks.values() if str(rank.id) == subject), None)
    records: list[Record] = []
    if known is not None and known.presence in PRESENT:
        records.append(RankDied(rank=known.id, incarnation=known.incarnation, reason=reason, confirmed=True))
    if known is not None and known.incident:
        records.append(IncidentAmended(id=known.incident, evidence=evidence, decision=decision, reason=reason))
        return records
    opened = IncidentOpened(
        id=fabric.next_incident(),
        what=f"{run.job}: {reason}",
        subject=subject or f"{run.job}#run",
        job=run.job,
        evidence=evidence,
        decision=decision,
        reason=reason,
    )
    return [*records, opened]


def _finish(fabric: Fabric, run: Run, now: float) -> Decision:
    """Once nothing of the attempt is left: what was decided when it was stopped."""
    left: list[str] = []
    for node in run.nodes:
        status = _status(fabric, run, node)
        unknown = node not in fabric.watch.nodes
        busy = status is not None and any(rank.state != "ended" for rank in status.ranks)
        if fabric.watch.node_speaks(node, now) and (unknown or busy):
            left.append(node)
    if left:
        halt = Halt(term=fabric.term, job=run.job, attempt=run.attempt, grace_seconds=run.task.grace_seconds)
        return Decision(tasks=tuple((node, halt) for node in left))
    if run.then == "restart":
        wait = _wait(run)
        ended = AttemptEnded(job=run.job, attempt=run.attempt, wait_seconds=wait)
        return Decision((*_gone(fabric, run), ended), reason=f"{run.job}: nothing is left of attempt {run.attempt}")
    return _end(fabric, run, "cancelled" if run.then == "cancel" else "failed", run.reason)


def _wait(run: Run) -> float:
    """None after a step forward; then more each time."""
    idle = 0
    for before, after in zip(reversed(run.notes[:-1]), reversed(run.notes), strict=False):
        if after.step > before.step:
            break
        idle += 1
    return FIRST_WAIT if idle == 0 else min(LONGEST_WAIT, 0.5 * 2.0 ** (idle - 1))


def _gone(fabric: Fabric, run: Run) -> list[Record]:
    """Ranks that were ended with the attempt: nobody waits for them to come back."""
    records: list[Record] = []
    for rank in sorted(fabric.ranks_of_job.get(run.job, ())):
        known = fabric.ranks[rank]
        if known.presence in PRESENT:
            records.append(RankLeft(rank=rank, incarnation=known.incarnation, how="interrupted"))
            if known.incident:
                records.append(IncidentAmended(id=known.incident, outcome="it was ended with its peers", closed=True))
    return records


def _recovered(fabric: Fabric, run: Run) -> list[Record]:
    """The incidents that led to this attempt are over."""
    before = run.notes[-2] if len(run.notes) > 1 else None
    if before is None or before.stopping is None:
        return []
    where = f"from step {run.resume_step}" if run.resume_step is not None else "from the beginning"
    outcome = f"started again {where} as attempt {run.attempt}"
    return [IncidentAmended(id=i.id, outcome=outcome, closed=True) for i in _open(fabric, run.job)]


def _open(fabric: Fabric, job: str) -> list[Incident]:
    return [
        i
        for i in fabric.incidents.values()
        if i.closed is None and i.job == job and (i.subject == f"{job}#run" or i.subject.startswith(f"{job}/"))
    ]


def _end(fabric: Fabric, run: Run, phase: Literal["done", "failed", "cancelled"], reason: str) -> Decision:
    records: list[Record] = _gone(fabric, run)
    outcome = {"done": "finished", "failed": "failed", "cancelled": "stopped"}[phase]
    records += [IncidentAmended(id=i.id, outcome=f"the job {phase}", closed=True) for i in _open(fabric, run.job)]
    records.append(RunEnded(job=run.job, phase=phase, reason=reason))
    job = fabric.jobs.get(run.job)
    if job is not None and job.phase is JobPhase.RUNNING:
        records.append(JobEnded(job=run.job, outcome=outcome, reason=reason))
    dismiss = Dismiss(term=fabric.term, job=run.job, attempt=run.attempt)
    return Decision(
        tuple(records), tasks=tuple((node, dismiss) for node in run.nodes), reason=f"{run.job} {phase}: {reason}"
    )
