"""What follows from an event: records for the log, commands for ranks, an answer for who asked, and the reason.

`decide` looks and judges and changes nothing. The engine (engine.py) folds what it returns; the weaver sends nothing of
it before the log has it.
"""

from __future__ import annotations

from torchloom.core import timers
from torchloom.core.changes import orders, requests, two_phase_commit
from torchloom.core.decision import NOTHING, Decision, together
from torchloom.core.detect.hang import HangDiagnosis
from torchloom.core.devices import device_reports
from torchloom.core.devices.device_failures import with_responses
from torchloom.core.events import (
    Asked,
    Event,
    FactReported,
    FellSilent,
    Found,
    Heard,
    JobDue,
    LighthouseHeard,
    LinkClosed,
    LinkOpened,
    NodeHeard,
    Replied,
    Reported,
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
from torchloom.core.state.device import Blame
from torchloom.core.torchft import drain, members
from torchloom.protocol.facts import DeviceFailed, DeviceRecovered, DeviceWarned, Inspected, RankExited
from torchloom.protocol.operator import (
    Cancel,
    Drain,
    DrainReplica,
    EvictReplica,
    Fail,
    Recover,
    Register,
    Revert,
    SetKnobs,
    Steer,
    Submit,
)
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
    Resumed,
    Saved,
    SaveFailed,
    StepReport,
)
from torchloom.protocol.records import TermBegan

__all__ = ["NOTHING", "Decision", "decide"]


def decide(cluster: ClusterState, event: Event, now: float) -> Decision:
    decision = members.with_evictions(cluster, _decide(cluster, event, now))
    return number_incidents(decision, cluster.incidents.count)


def _decide(cluster: ClusterState, event: Event, now: float) -> Decision:
    match event:
        case Heard(rank=rank, beat=beat, found=found):
            life = lifecycle.heard(cluster, rank, beat, now)
            return together((life, findings.handle_findings(cluster, rank, found, now)))
        case LinkClosed(rank=rank, incarnation=incarnation, reason=reason):
            return lifecycle.link_closed(cluster, rank, incarnation, reason)
        case LinkOpened(rank=rank, incarnation=incarnation):
            return lifecycle.link_opened(cluster, rank, incarnation, now)
        case Reported(rank=rank, report=Hello() as hello):
            return lifecycle.hello(cluster, rank, hello)
        case Reported(rank=rank, report=Goodbye() as goodbye):
            return lifecycle.goodbye(cluster, rank, goodbye)
        case FactReported(fact=RankExited() as exited):
            return lifecycle.exited(cluster, exited)
        case FactReported(fact=Inspected() as inspected):
            return hangs.inspected(cluster, inspected)
        case FactReported(fact=DeviceFailed(device=device, cause=cause, source=source, alert=alert, began=began)):
            blame = Blame(by=alert or source, cause=cause, began=began, alert=bool(alert))
            return with_responses(cluster, device_reports.fail(cluster, device, source, blame), device, now)
        case FactReported(fact=DeviceRecovered() as recovered):
            return device_reports.take_back(cluster, recovered)
        case FactReported(fact=DeviceWarned() as warned):
            return with_responses(cluster, device_reports.warn(cluster, warned), warned.device, now)
        case Asked(ask=Fail(device=device, cause=cause, operator=operator)):
            blame = Blame(by=device_reports.HAND, cause=cause)
            return with_responses(cluster, device_reports.fail(cluster, device, operator, blame), device, now)
        case Asked(ask=Recover(device=device, operator=operator)):
            return device_reports.recover(cluster, device, operator)
        case Asked(ask=Register() as register):
            return device_reports.register(cluster, register)
        case Reported(rank=rank, report=Knobs() as offered):
            return lifecycle.offers(cluster, rank, offered)
        case Reported(rank=rank, report=Saved() as saved):
            return checkpoint_reports.saved(cluster, rank, saved)
        case Reported(rank=rank, report=SaveFailed() as failed):
            return checkpoint_reports.failed(cluster, rank, failed)
        case Reported(rank=rank, report=Resumed() as resumed):
            return checkpoint_reports.resumed(cluster, rank, resumed)
        case Asked(ask=SetKnobs() as ask, reply=reply):
            return requests.set_knobs(cluster, ask, reply)
        case Asked(ask=Revert() as ask, reply=reply):
            return requests.revert(cluster, ask, reply)
        case Asked(ask=Steer(verb="pause" | "stop" | "checkpoint") as ask, reply=reply):
            return requests.act(cluster, ask, reply)
        case Asked(ask=Steer() as ask, reply=reply):
            return orders.give(cluster, ask, reply)
        case Asked(ask=Submit() as ask):
            return submission.submit(cluster, ask)
        case Asked(ask=Cancel() as ask):
            return submission.cancel(cluster, ask, now)
        case Asked(ask=Drain() as ask):
            return submission.drain(cluster, ask)
        case Asked(ask=EvictReplica() as ask):
            return drain.evict_replica(cluster, ask, now)
        case Asked(ask=DrainReplica() as ask):
            return drain.drain_replica(cluster, ask)
        case Reported(rank=rank, report=Joined() | Regrouped() | Healed() | Discarded() as said):
            return members.reported(cluster, rank, said)
        case LighthouseHeard(job=job):
            return members.lighthouse_heard(cluster, job)
        case NodeHeard(node=node):
            return reconcile.heard(cluster, node)
        case RunDue(job=job, hang=hang):
            return _due(cluster, job, hang, now)
        case JobDue(job=job, hang=hang):
            return hangs.look_at_job(cluster, job, hang, now)
        case Found(rank=rank, found=found):
            return findings.handle_findings(cluster, rank, found, now)
        case Replied(reply=reply):
            return _replied(cluster, reply)
        case VerdictKnown(change=change, commit=commit, abort=abort):
            return two_phase_commit.verdict_known(cluster, change, commit, abort)
        case RollCalled():
            return lifecycle.roll_called(cluster, now)
        case FellSilent(ranks=silent):
            return timers.fell_silent(cluster, silent, now)
        case Tick():
            return timers.tick(cluster, now)
        case TookOver(weaver=weaver):
            term = cluster.term + 1
            return Decision((TermBegan(term=term, weaver=weaver),))
    raise AssertionError(f"no rule for {event!r}")


def _due(cluster: ClusterState, job: str, hang: HangDiagnosis | None, now: float) -> Decision:
    run = cluster.runs.active(job)
    decision = reconcile.due(cluster, job, hang, now)
    return decision if decision or run is None or not run.drained else drain.ask_to_leave(cluster, run)


def _replied(cluster: ClusterState, reply: Reply) -> Decision:
    operation = cluster.runtime.operations.find(reply.id)
    if operation is None:
        return NOTHING
    match reply:
        case StepReport():
            return two_phase_commit.standing(cluster, operation)
        case Ready():
            return two_phase_commit.ready(cluster, operation)
        case Applied():
            return two_phase_commit.applied(cluster, operation)
        case Ordered():
            return orders.ordered(cluster, operation)
