"""Requests of the loader scheduler to ranks, and of operators to the scheduler."""

from __future__ import annotations

from torchloom.core.changes.requests import did_you_mean, request_change
from torchloom.core.decision import Decision, Handlers, Refused, merge_decisions
from torchloom.core.events import LoadersDue
from torchloom.core.scheduling.observation import SCHEDULER
from torchloom.core.state.cluster import ClusterState
from torchloom.knob_validation import LOADERS
from torchloom.protocol.operator import Done, ScheduleSet, SetKnobs, SetSchedule
from torchloom.protocol.phrase import phrase


def resize(cluster: ClusterState, due: LoadersDue) -> Decision:
    """A job that cannot be changed now is asked again later."""
    decisions = [Decision((due.allocated,))] if due.allocated is not None else []
    for command in due.commands:
        ask = SetKnobs(
            request=command.request,
            job=command.job,
            values={LOADERS: command.loaders},
            operator=SCHEDULER,
            wait=False,
        )
        try:
            decisions.append(request_change(cluster, ask, ""))
        except Refused:
            continue
    return merge_decisions(decisions)


def set_schedule(cluster: ClusterState, ask: SetSchedule) -> Decision:
    known = {*cluster.runtime.nodes, *cluster.schedule.budgets, *(rank.node for rank in cluster.ranks.values())}
    if (node := next((node for node in ask.budgets if node not in known), None)) is not None:
        raise Refused(phrase("node_unknown", node=node), did_you_mean(node, known, phrase("see_nodes")))
    before = cluster.schedule
    budgets = {node: budget for node, budget in (before.budgets | ask.budgets).items() if budget is not None}
    rules = ScheduleSet(
        policy=ask.policy or before.policy,
        objective=ask.objective or before.objective,
        budgets=budgets,
        operator=ask.operator,
    )
    objective = rules.objective if rules.policy == "ours" else ""
    answer = Done(text=phrase("schedule_set", policy=rules.policy, objective=objective, is_on=rules.policy != "off"))
    unchanged = (rules.policy, rules.objective, budgets) == (before.policy, before.objective, before.budgets)
    return Decision(() if unchanged else (rules,), answer=answer)


HANDLERS: Handlers = {SetSchedule: lambda cluster, ask, _reply, _now: set_schedule(cluster, ask)}
