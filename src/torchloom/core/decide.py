"""What follows from an event: records for the log, commands for ranks, an answer for the operator, and the reason.

`decide` reads the state and changes nothing. The engine (engine.py) folds the records that it returns; the weaver sends
nothing of a decision before the log has stored it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torchloom.core import events, timers
from torchloom.core.changes import loader_allocation, requests, two_phase_commit
from torchloom.core.decision import NOTHING, Decision, Handlers, Refused, number_incidents
from torchloom.core.devices import device_reports
from torchloom.core.incidents import findings
from torchloom.core.jobs import reconcile, release, submission
from torchloom.core.ranks import checkpoint_reports, lifecycle
from torchloom.core.state.cluster import ClusterState
from torchloom.core.state.pending_operations import PendingOperation
from torchloom.core.state.rank_states import Rank
from torchloom.core.torchft import members
from torchloom.protocol import facts
from torchloom.protocol import rank as rank_messages
from torchloom.protocol.records import TermBegan

REPORTS: Mapping[type[rank_messages.Report], Callable[[ClusterState, Rank, Any], Decision]] = {
    rank_messages.Knobs: lifecycle.record_knobs,
    rank_messages.Saved: checkpoint_reports.record_saved,
    rank_messages.SaveFailed: checkpoint_reports.record_failed,
    rank_messages.Resumed: checkpoint_reports.record_resumed,
    rank_messages.Joined: members.handle_joined,
    **dict.fromkeys(members.RECORDS, members.record_report),
}
"""What ranks report after they have joined, in their latest incarnation."""
REPLIES: Mapping[type[rank_messages.Reply], Callable[[ClusterState, PendingOperation], Decision]] = {
    rank_messages.StepReport: two_phase_commit.handle_step_report,
    rank_messages.Ready: two_phase_commit.handle_ready,
    rank_messages.Applied: two_phase_commit.handle_applied,
    rank_messages.Ordered: requests.handle_ordered,
}
HANDLERS: Handlers = {
    **device_reports.HANDLERS,
    **requests.HANDLERS,
    **submission.HANDLERS,
    **release.HANDLERS,
    **members.HANDLERS,
    **loader_allocation.HANDLERS,
}
"""What operators ask for."""


def decide(cluster: ClusterState, event: events.Event, now: float) -> Decision:
    try:
        decision = _decide(cluster, event, now)
    except Refused as refusal:
        return Decision(answer=refusal.answer)
    return number_incidents(members.add_evictions(cluster, decision), cluster.incidents.count)


def _decide(cluster: ClusterState, event: events.Event, now: float) -> Decision:
    match event:
        case events.BeatReceived(rank=rank, beat=beat, findings=detected):
            life = lifecycle.handle_beat(cluster, rank, beat, now)
            return life + findings.handle_findings(cluster, rank, detected, now)
        case events.LinkClosed(rank=rank, incarnation=incarnation, reason=reason):
            return lifecycle.handle_link_closed(cluster, rank, incarnation, reason)
        case events.LinkOpened(rank=rank, incarnation=incarnation):
            return lifecycle.handle_link_opened(cluster, rank, incarnation, now)
        case events.ReportReceived(rank=rank, report=rank_messages.Hello() as hello):
            return lifecycle.handle_hello(cluster, rank, hello)
        case events.ReportReceived(rank=rank, report=rank_messages.Goodbye() as goodbye):
            return lifecycle.handle_goodbye(cluster, rank, goodbye)
        case events.ReportReceived(rank=rank, report=report):
            sender = cluster.ranks.find(rank, report.incarnation)
            return NOTHING if sender is None else REPORTS[type(report)](cluster, sender, report)
        case events.FactReceived(fact=facts.RankExited() as exited):
            return lifecycle.handle_exit(cluster, exited)
        case events.FactReceived(fact=facts.Inspected() as inspected):
            return findings.handle_inspected(cluster, inspected)
        case events.FactReceived(fact=facts.DeviceFailed() as failed):
            return device_reports.handle_failed(cluster, failed, now)
        case events.FactReceived(fact=facts.DeviceRecovered() as recovered):
            return device_reports.withdraw(cluster, recovered)
        case events.FactReceived(fact=facts.DeviceWarned() as warned):
            return device_reports.warn(cluster, warned, now)
        case events.RequestReceived(ask=ask, reply=reply):
            return HANDLERS[type(ask)](cluster, ask, reply, now)
        case events.LighthouseBeatReceived(job=job):
            return members.handle_lighthouse_beat(cluster, job)
        case events.NodeBeatReceived(node=node):
            return reconcile.handle_node_beat(cluster, node)
        case events.RunDue(job=job, hang=hang):
            return reconcile.reconcile_run(cluster, job, hang, now)
        case events.JobDue(job=job, hang=hang):
            return findings.look_at_job(cluster, job, hang, now)
        case events.FindingsMade(rank=rank, findings=detected):
            return findings.handle_findings(cluster, rank, detected, now)
        case events.LoadersDue():
            return loader_allocation.resize(cluster, event)
        case events.ReplyReceived(reply=reply):
            operation = cluster.runtime.operations.find(reply.id)
            return NOTHING if operation is None else REPLIES[type(reply)](cluster, operation)
        case events.VerdictKnown(change=change, commit=commit, abort=abort):
            return two_phase_commit.handle_verdict(cluster, change, commit, abort)
        case events.RollCalled():
            return lifecycle.compare_connections(cluster, now)
        case events.RanksSilent(ranks=silent):
            return lifecycle.lose_silent(cluster, silent, now)
        case events.Tick():
            return timers.tick(cluster, now)
        case events.TookOver(weaver=weaver):
            return Decision((TermBegan(term=cluster.term + 1, weaver=weaver),))
    raise AssertionError(f"no rule for {event!r}")
