"""What is asked about runs: start one, end one, use a node no more."""

from __future__ import annotations

import shlex

from torchloom.core import running
from torchloom.core.decision import Decision
from torchloom.core.fabric import Fabric
from torchloom.core.placing import too_large
from torchloom.core.presence import PRESENT, JobPhase
from torchloom.core.runs import RunPhase
from torchloom.core.stopping import Cause, stop
from torchloom.messages import Cancel, Done, Drain, JobBegan, No, NodeDrained, Record, RunSubmitted, Submit, Task


def submit(fabric: Fabric, ask: Submit) -> Decision:
    known = fabric.runs.by_job.get(ask.job)
    if known is not None and known.request == ask.request:
        return Decision(answer=Done(text=f"{ask.job} was submitted"))
    if known is not None and not known.over:
        return _no(f"{ask.job} is {known.phase} already", f"choose another name, or end it: `loom cancel {ask.job}`")
    job = fabric.jobs.get(ask.job)
    members = [fabric.ranks[rank] for rank in fabric.ranks_of_job.get(ask.job, ())]
    if job is not None and job.phase is JobPhase.RUNNING and any(rank.presence in PRESENT for rank in members):
        return _no(f"{ask.job} is running already, started by another launcher", "choose another name")
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
        ended = running.end(fabric, run, "cancelled", ask.why)
        return Decision(ended.records, tasks=ended.tasks, answer=answer, reason=f"{run.job}: {ask.why}")
    if run.phase is RunPhase.STOPPING and run.then == "cancel":
        return Decision(answer=answer)
    stopping = stop(fabric, run, now, Cause(ask.why, then="cancel"))
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
