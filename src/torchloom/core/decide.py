"""What follows from an event: records for the log, commands for ranks, an answer for the operator, and the reason.

`decide` reads the state and changes nothing. The engine (engine.py) folds the records that it returns; the weaver sends
nothing of a decision before the log has stored it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torchloom.core import timers
from torchloom.core.changes import orders, requests, two_phase_commit
from torchloom.core.decision import NOTHING, Decision, Handlers, merge_decisions
from torchloom.core.devices import device_reports
from torchloom.core.events import (
    BeatReceived,
    Event,
    FactReceived,
    FindingsMade,
    JobDue,
    LighthouseBeatReceived,
    LinkClosed,
    LinkOpened,
    NodeBeatReceived,
    RanksSilent,
    ReplyReceived,
    ReportReceived,
    RequestReceived,
    RollCalled,
    RunDue,
    Tick,
    TookOver,
    VerdictKnown,
)
from torchloom.core.incident_ids import number_incidents
from torchloom.core.incidents import findings, hangs
from torchloom.core.jobs import reconcile, submission
from torchloom.core.ranks import checkpoint_reports, lifecycle
from torchloom.core.state.cluster import ClusterState
from torchloom.core.state.pending_operations import PendingOperation
from torchloom.core.torchft import drain, members
from torchloom.protocol.facts import DeviceFailed, DeviceRecovered, DeviceWarned, Inspected, RankExited
from torchloom.protocol.ids import RankId
from torchloom.protocol.operator import Steer
from torchloom.protocol.rank import (
    Applied,
    Discarded,
    Goodbye,
    Healed,
    Hello,
    Joined,
    Knobs,
    Ordered,
    Ready,
    Regrouped,
    Reply,
    Report,
    Resumed,
    Saved,
    SaveFailed,
    StepReport,
)
from torchloom.protocol.records import Blame, TermBegan

__all__ = ["NOTHING", "Decision", "decide"]


REPORTS: Mapping[type[Report], Callable[[ClusterState, RankId, Any], Decision]] = {
    Hello: lifecycle.handle_hello,
    Goodbye: lifecycle.handle_goodbye,
    Knobs: lifecycle.record_knobs,
    Saved: checkpoint_reports.record_saved,
    SaveFailed: checkpoint_reports.record_failed,
    Resumed: checkpoint_reports.record_resumed,
    **dict.fromkeys((Joined, Regrouped, Healed, Discarded), members.handle_report),
}
REPLIES: Mapping[type[Reply], Callable[[ClusterState, PendingOperation], Decision]] = {
    StepReport: two_phase_commit.handle_step_report,
    Ready: two_phase_commit.handle_ready,
    Applied: two_phase_commit.handle_applied,
    Ordered: orders.handle_ordered,
}


def decide(cluster: ClusterState, event: Event, now: float) -> Decision:
    decision = members.add_evictions(cluster, _decide(cluster, event, now))
    return number_incidents(decision, cluster.incidents.count)


def _decide(cluster: ClusterState, event: Event, now: float) -> Decision:
    match event:
        case BeatReceived(rank=rank, beat=beat, findings=detected):
            life = lifecycle.handle_beat(cluster, rank, beat, now)
            return merge_decisions((life, findings.handle_findings(cluster, rank, detected, now)))
        case LinkClosed(rank=rank, incarnation=incarnation, reason=reason):
            return lifecycle.handle_link_closed(cluster, rank, incarnation, reason)
        case LinkOpened(rank=rank, incarnation=incarnation):
            return lifecycle.handle_link_opened(cluster, rank, incarnation, now)
        case ReportReceived(rank=rank, report=report):
            return REPORTS[type(report)](cluster, rank, report)
        case FactReceived(fact=RankExited() as exited):
            return lifecycle.handle_exit(cluster, exited)
        case FactReceived(fact=Inspected() as inspected):
            return hangs.inspected(cluster, inspected)
        case FactReceived(fact=DeviceFailed(device=device, cause=cause, source=source, alert=alert, began=began)):
            blame = Blame(by=alert or source, cause=cause, began=began, alert=bool(alert))
            return device_reports.fail(cluster, device, source, blame, now)
        case FactReceived(fact=DeviceRecovered() as recovered):
            return device_reports.withdraw(cluster, recovered)
        case FactReceived(fact=DeviceWarned() as warned):
            return device_reports.warn(cluster, warned, now)
        case RequestReceived(ask=ask, reply=reply):
            return HANDLERS[type(ask)](cluster, ask, reply, now)
        case LighthouseBeatReceived(job=job):
            return members.handle_lighthouse_beat(cluster, job)
        case NodeBeatReceived(node=node):
            return reconcile.handle_node_beat(cluster, node)
        case RunDue(job=job, hang=hang):
            return reconcile.reconcile_run(cluster, job, hang, now)
        case JobDue(job=job, hang=hang):
            return hangs.look_at_job(cluster, job, hang, now)
        case FindingsMade(rank=rank, findings=detected):
            return findings.handle_findings(cluster, rank, detected, now)
        case ReplyReceived(reply=reply):
            operation = cluster.runtime.operations.find(reply.id)
            return NOTHING if operation is None else REPLIES[type(reply)](cluster, operation)
        case VerdictKnown(change=change, commit=commit, abort=abort):
            return two_phase_commit.handle_verdict(cluster, change, commit, abort)
        case RollCalled():
            return lifecycle.compare_connections(cluster, now)
        case RanksSilent(ranks=silent):
            return timers.lose_silent(cluster, silent, now)
        case Tick():
            return timers.tick(cluster, now)
        case TookOver(weaver=weaver):
            term = cluster.term + 1
            return Decision((TermBegan(term=term, weaver=weaver),))
    raise AssertionError(f"no rule for {event!r}")


def _steer(cluster: ClusterState, ask: Steer, reply: str, _now: float) -> Decision:
    handle = requests.request_change if ask.verb in {"pause", "stop", "checkpoint"} else orders.give
    return handle(cluster, ask, reply)


HANDLERS: Handlers = {
    Steer: _steer,
    **device_reports.HANDLERS,
    **requests.HANDLERS,
    **submission.HANDLERS,
    **drain.HANDLERS,
}
"""What operators ask for."""
