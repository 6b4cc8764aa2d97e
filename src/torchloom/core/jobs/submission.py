"""Requests of operators about runs: submit, cancel, drain a node."""

from __future__ import annotations

import shlex
from dataclasses import replace

from torchloom.core.changes.requests import did_you_mean
from torchloom.core.decision import NOTHING, Decision, Handlers, Refused, merge_decisions
from torchloom.core.detect.kinds_and_responses import KINDS
from torchloom.core.jobs import reconcile
from torchloom.core.jobs.arrival import jobs_before
from torchloom.core.jobs.device_groups import find_error as find_group_error
from torchloom.core.jobs.placement import explain_too_large
from torchloom.core.jobs.restart_decision import Cause, stop
from torchloom.core.state.cluster import ClusterState
from torchloom.core.state.rank_states import PRESENT, JobPhase, Presence
from torchloom.core.state.run_states import Run, RunPhase
from torchloom.core.torchft.replica_groups import split_job
from torchloom.protocol.ids import NAME
from torchloom.protocol.job_spec import Task
from torchloom.protocol.operator import Annotate, Cancel, Done, Drain, JobAnnotated, NodeDrained, Submit
from torchloom.protocol.phrase import Phrase, phrase
from torchloom.protocol.records import JobBegan, Record
from torchloom.protocol.run_records import RunSubmitted


def submit(cluster: ClusterState, ask: Submit) -> Decision:
    runs = split_job(ask.job, ask.task)
    if not all(NAME.fullmatch(name) and NAME.fullmatch(task.replica) for name, task in runs):
        raise Refused(phrase("job_name_too_long"), phrase("choose_shorter_name"))
    there = [run for name, _ in (*runs, (ask.job, None)) if (run := cluster.runs.by_name.get(name)) is not None]
    if any(run.request == ask.request for run in there):
        return Decision(answer=Done(text=phrase("submitted_before", job=ask.job)))
    if busy := next((run for run in (*there, *cluster.runs.of_job(ask.job)) if not run.over), None):
        exists = phrase("run_exists", job=busy.name, phase=str(busy.phase))
        raise Refused(exists, phrase("rename_or_cancel", job=busy.replica_id.job))
    job = cluster.jobs.get(ask.job)
    members = cluster.ranks.of_job(ask.job)
    if job is not None and job.phase is JobPhase.RUNNING and any(rank.presence in PRESENT for rank in members):
        lost = not any(rank.presence is Presence.LIVE for rank in members)
        hint = phrase("wait_or_rename" if lost else "choose_other_name")
        raise Refused(phrase("foreign_job_runs", job=ask.job), hint)
    if wrong := _find_error(ask.task):
        raise Refused(wrong, phrase("correct_and_resubmit"))
    if ask.task.node is not None:
        if ask.task.node not in cluster.runtime.nodes:
            raise _no_agent(cluster, ask.task.node)
        if cluster.runtime.nodes[ask.task.node].beat.tied and not ask.task.attended:
            raise Refused(phrase("node_serves_one_job", node=ask.task.node), phrase("name_other_node"))
    _check_predecessor(cluster, ask)
    _check_port(cluster, ask)
    if not ask.task.attended and (why := explain_too_large(cluster, ask.task)):
        raise Refused(why, phrase("see_nodes" if ask.task.groups else "use_more_nodes"))
    records: list[Record] = [RunSubmitted.from_fields(ask, job=name, task=task) for name, task in runs]
    if job is None or job.phase is not JobPhase.RUNNING:
        records.insert(0, JobBegan(job=ask.job))
    return Decision(tuple(records), answer=Done(text=phrase("submitted", job=ask.job)))


def cancel(cluster: ClusterState, ask: Cancel, now: float) -> Decision:
    run = cluster.runs.active(ask.job)
    runs = [run] if run is not None else cluster.runs.of_job(ask.job)
    if not runs and ask.job in cluster.runs.by_name:
        phase = cluster.runs.by_name[ask.job].phase
        return Decision(answer=Done(text=phrase("is_in_phase", name=ask.job, phase=str(phase))))
    if not runs:
        raise Refused(phrase("foreign_job", job=ask.job), phrase("stop_foreign_job", job=ask.job))
    # A lighthouse ends with its replicas.
    ends = [_cancel(cluster, one, ask.why, now) for one in runs if one is run or not one.is_lighthouse]
    return replace(merge_decisions(ends), answer=Done(text=phrase("being_cancelled", job=ask.job)))


def _cancel(cluster: ClusterState, run: Run, why: str, now: float) -> Decision:
    if run.phase in {RunPhase.SUBMITTED, RunPhase.RESTARTING, RunPhase.RELEASED}:
        return reconcile.end(cluster, run, "cancelled", why)
    if run.phase is RunPhase.STOPPING and run.next_action == "cancel":
        return NOTHING
    return stop(cluster, run, now, Cause(why, next_action="cancel"))


def drain(cluster: ClusterState, ask: Drain) -> Decision:
    if ask.node not in cluster.runtime.nodes and ask.node not in cluster.runs.drained:
        raise _no_agent(cluster, ask.node)
    if (ask.node in cluster.runs.drained) != ask.undo:
        return Decision(answer=Done(text=phrase("is_drained", name=ask.node, undo=ask.undo)))
    record = NodeDrained(node=ask.node, drained=not ask.undo, operator=ask.operator)
    text = phrase("node_usable" if ask.undo else "node_draining", node=ask.node)
    return Decision((record,), answer=Done(text=text))


def annotate(cluster: ClusterState, ask: Annotate) -> Decision:
    if ask.job not in cluster.jobs:
        raise Refused(phrase("job_unknown", job=ask.job), did_you_mean(ask.job, cluster.jobs, phrase("see_jobs")))
    answer = Done(text=phrase("of_job", job=ask.job, text=ask.text))
    marks = [mark for _, mark in cluster.marks.get(ask.job, ())]
    if any(isinstance(mark, JobAnnotated) and mark.request == ask.request for mark in marks):
        return Decision(answer=answer)
    return Decision((JobAnnotated.from_fields(ask, step=cluster.step_of(ask.job)),), answer=answer)


def _find_error(task: Task) -> Phrase | None:
    """Why no process could be started from a task, if none could."""
    words = (*task.argv, task.python, task.cwd, task.log_dir, task.checkpoint_dir, *task.env, *task.env.values())
    if any("\0" in word for word in words):
        return phrase("nul_in_task")
    if (bad := next((name for name in task.env if not name or "=" in name), None)) is not None:
        return phrase("bad_variable_name", name=bad)
    if (event := next((rule.on for rule in task.policy if rule.on not in KINDS), None)) is not None:
        return phrase("event_unknown", event=event)
    if task.groups and (wrong := find_group_error(task)):
        return wrong
    if task.port and task.torchft is not None:
        return phrase("port_not_with_torchft", port=task.port)
    if task.node is not None and task.nodes > 1:
        return phrase("one_node_named", nodes=task.nodes)
    if task.least is not None and task.least > task.per_node:
        return phrase("least_ranks_above_most", least=task.least, most=task.per_node)
    if task.min_nodes is not None and task.min_nodes > task.nodes:
        return phrase("least_nodes_above_most", least=task.min_nodes, most=task.nodes)
    try:
        shlex.split(task.resume_arg)
    except ValueError as error:
        return phrase("bad_resume_arg", value=task.resume_arg, error=str(error))
    return None


def _check_predecessor(cluster: ClusterState, ask: Submit) -> None:
    """The job that must have ended first has to be there. As it is older, no two jobs can wait for each other."""
    after = ask.task.after
    if after == ask.job:
        raise Refused(phrase("follows_itself", job=ask.job), phrase("name_other_job"))
    if after is not None and after not in cluster.jobs:
        raise Refused(phrase("job_unknown", job=after), did_you_mean(after, cluster.jobs, phrase("submit_it_first")))


def _check_port(cluster: ClusterState, ask: Submit) -> None:
    """Two jobs that may run at the same time cannot meet at one port of one node."""
    task = ask.task
    if not task.port:
        return
    before = set(jobs_before(cluster, task))
    for run in cluster.runs.by_name.values():
        uses = run.task.port == task.port and not run.over and run.ordinal <= 1  # later attempts use another one
        if uses and run.replica_id.job not in before and _may_meet(_first_node(run.task), _first_node(task)):
            raise Refused(phrase("port_of_other_job", port=task.port, job=run.name), phrase("other_port_or_after"))


def _first_node(task: Task) -> str | None:
    """The node of rank 0, if it is named."""
    return task.groups[0].node if task.groups else task.node


def _may_meet(one: str | None, other: str | None) -> bool:
    return one is None or other is None or one == other


def _no_agent(cluster: ClusterState, node: str) -> Refused:
    return Refused(phrase("no_agent_on_node", node=node), phrase("agents_are_on", nodes=sorted(cluster.runtime.nodes)))


HANDLERS: Handlers = {
    Submit: lambda cluster, ask, _reply, _now: submit(cluster, ask),
    Cancel: lambda cluster, ask, _reply, now: cancel(cluster, ask, now),
    Annotate: lambda cluster, ask, _reply, _now: annotate(cluster, ask),
    Drain: lambda cluster, ask, _reply, _now: drain(cluster, ask),
}
