"""What is asked about runs: start one, end one, use a node no more."""

from __future__ import annotations

import shlex
from dataclasses import replace

from torchloom.core import running
from torchloom.core.decision import NOTHING, Decision, together
from torchloom.core.fabric import Fabric
from torchloom.core.grouping import parts
from torchloom.core.placing import too_large
from torchloom.core.presence import PRESENT, JobPhase, Presence
from torchloom.core.runs import Run, RunPhase
from torchloom.core.stopping import Cause, stop
from torchloom.messages import Cancel, Done, Drain, JobBegan, No, NodeDrained, Record, RunSubmitted, Submit, Task


def submit(fabric: Fabric, ask: Submit) -> Decision:
    runs = parts(ask.job, ask.task)
    there = [run for name, _ in (*runs, (ask.job, None)) if (run := fabric.runs.by_job.get(name)) is not None]
    if any(run.request == ask.request for run in there):
        return Decision(answer=Done(text=f"{ask.job} was submitted"))
    if busy := next((run for run in (*there, *fabric.runs.of_job(ask.job)) if not run.over), None):
        return _no(
            f"{busy.job} is {busy.phase} already", f"choose another name, or end it: `loom cancel {busy.of.job}`"
        )
    job = fabric.jobs.get(ask.job)
    members = [fabric.ranks[rank] for rank in fabric.ranks_of_job.get(ask.job, ())]
    if job is not None and job.phase is JobPhase.RUNNING and any(rank.presence in PRESENT for rank in members):
        lost = not any(rank.presence is Presence.LIVE for rank in members)
        wait = "its ranks are lost, and given up before long: try again then, or choose another name"
        return _no(f"{ask.job} is running already, not started by torchLoom", wait if lost else "choose another name")
    if wrong := _wrong(ask.task):
        return _no(wrong, "mend it and submit it again")
    if ask.task.node is not None:
        seen = fabric.watch.nodes.get(ask.task.node)
        if seen is None:
            return _no(f"there is no agent on node {ask.task.node}", f"agents are on: {_known_nodes(fabric)}")
        if seen.beat.tied and not ask.task.attended:
            return _no(f"{ask.task.node} serves one job alone", "name another node, or none")
    if not ask.task.attended and (why := too_large(fabric, ask.task)):
        return _no(why, "fewer ranks on each of more nodes; `loom nodes` shows what there is")
    records: list[Record] = [
        RunSubmitted(job=name, task=task, request=ask.request, operator=ask.operator) for name, task in runs
    ]
    if job is None or job.phase is not JobPhase.RUNNING:
        records.insert(0, JobBegan(job=ask.job))
    return Decision(tuple(records), answer=Done(text=f"{ask.job} is submitted"), reason=f"{ask.job} is submitted")


def cancel(fabric: Fabric, ask: Cancel, now: float) -> Decision:
    runs = fabric.runs.of_job(ask.job)
    if runs and ask.job not in fabric.runs.by_job:  # of replicas; the lighthouse ends with them
        ends = [_cancel(fabric, run, ask.why, now) for run in runs if not run.serves]
        return replace(together(ends), answer=Done(text=f"{ask.job} is being cancelled"))
    run = fabric.runs.by_job.get(ask.job)
    if run is None:
        return _no(f"{ask.job} was not started by torchLoom", f"`loom stop {ask.job}` asks its ranks to end")
    if run.over:
        return Decision(answer=Done(text=f"{ask.job} is {run.phase}"))
    return replace(_cancel(fabric, run, ask.why, now), answer=Done(text=f"{ask.job} is being cancelled"))


def _cancel(fabric: Fabric, run: Run, why: str, now: float) -> Decision:
    if run.phase in {RunPhase.SUBMITTED, RunPhase.RESTARTING}:
        return replace(running.end(fabric, run, "cancelled", why), reason=f"{run.job}: {why}")
    if run.phase is RunPhase.STOPPING and run.then == "cancel":
        return NOTHING
    return replace(stop(fabric, run, now, Cause(why, then="cancel")), reason=f"{run.job}: {why}")


def drain(fabric: Fabric, ask: Drain) -> Decision:
    known = ask.node in fabric.watch.nodes or ask.node in fabric.runs.drained
    if not known:
        return _no(f"there is no agent on node {ask.node}", f"agents are on: {_known_nodes(fabric)}")
    if (ask.node in fabric.runs.drained) != ask.undo:
        return Decision(answer=Done(text=f"{ask.node} is {'not ' if ask.undo else ''}drained"))
    record = NodeDrained(node=ask.node, drained=not ask.undo, operator=ask.operator)
    text = f"{ask.node} may be used again" if ask.undo else f"nothing more is started on {ask.node}"
    return Decision((record,), answer=Done(text=text), reason=text)


def _wrong(task: Task) -> str:
    """What no process could be started with, or nothing."""
    words = (*task.argv, task.python, task.cwd, task.log_dir, task.checkpoint_dir, *task.env, *task.env.values())
    if any("\0" in word for word in words):
        return "a NUL in its words or its environment"
    if bad := next((name for name in task.env if not name or "=" in name), None):
        return f"{bad!r} cannot be the name of a variable"
    if task.node is not None and task.nodes > 1:
        return f"one node is named, and {task.nodes} are wanted"
    if task.least is not None and task.least > task.per_node:
        return f"at least {task.least} ranks on a node, and at most {task.per_node}"
    if task.min_nodes is not None and task.min_nodes > task.nodes:
        return f"at least {task.min_nodes} nodes, and at most {task.nodes}"
    try:
        shlex.split(task.resume_arg)
    except ValueError as error:
        return f"resume_arg {task.resume_arg!r}: {error}"
    return ""


def _known_nodes(fabric: Fabric) -> str:
    return ", ".join(sorted(fabric.watch.nodes)) or "none"


def _no(why: str, hint: str) -> Decision:
    return Decision(answer=No(why=why, hint=hint))
