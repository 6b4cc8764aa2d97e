"""What follows from an event: records for the log, commands for ranks, an answer for who asked, and the reason.

`decide` looks and judges and changes nothing. The engine (engine.py) folds what it returns; the weaver sends nothing of
it before the log has it.
"""

from __future__ import annotations

from torchloom.core import timers
from torchloom.core.changes import orders, requests, two_phase_commit
from torchloom.core.decision import NOTHING, Decision, together
from torchloom.core.detect.hang import Verdict
from torchloom.core.devices import device_reports
from torchloom.core.devices.device_failures import with_responses
from torchloom.core.events import (
    Asked,
    Event,
    FactTold,
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
from torchloom.core.state.cluster import Fabric
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
    Standing,
)
from torchloom.protocol.records import TermBegan

__all__ = ["NOTHING", "Decision", "decide"]


def decide(fabric: Fabric, event: Event, now: float) -> Decision:
    decision = members.with_evictions(fabric, _decide(fabric, event, now))
    return number_incidents(decision, fabric.incidents.count)


def _decide(fabric: Fabric, event: Event, now: float) -> Decision:
    match event:
        case Heard(rank=rank, beat=beat, found=found):
            life = lifecycle.heard(fabric, rank, beat, now)
            return together((life, findings.found(fabric, rank, found, now)))
        case LinkClosed(rank=rank, incarnation=incarnation, reason=reason):
            return lifecycle.link_closed(fabric, rank, incarnation, reason)
        case LinkOpened(rank=rank, incarnation=incarnation):
            return lifecycle.link_opened(fabric, rank, incarnation, now)
        case Reported(rank=rank, report=Hello() as hello):
            return lifecycle.hello(fabric, rank, hello)
        case Reported(rank=rank, report=Goodbye() as goodbye):
            return lifecycle.goodbye(fabric, rank, goodbye)
        case FactTold(fact=RankExited() as exited):
            return lifecycle.exited(fabric, exited)
        case FactTold(fact=Inspected() as inspected):
            return hangs.inspected(fabric, inspected)
        case FactTold(fact=DeviceFailed(device=device, cause=cause, source=source, alert=alert, began=began)):
            blame = Blame(by=alert or source, cause=cause, began=began, alert=bool(alert))
            return with_responses(fabric, device_reports.fail(fabric, device, source, blame), device, now)
        case FactTold(fact=DeviceRecovered() as recovered):
            return device_reports.take_back(fabric, recovered)
        case FactTold(fact=DeviceWarned() as warned):
            return with_responses(fabric, device_reports.warn(fabric, warned), warned.device, now)
        case Asked(ask=Fail(device=device, cause=cause, operator=operator)):
            blame = Blame(by=device_reports.HAND, cause=cause)
            return with_responses(fabric, device_reports.fail(fabric, device, operator, blame), device, now)
        case Asked(ask=Recover(device=device, operator=operator)):
            return device_reports.recover(fabric, device, operator)
        case Asked(ask=Register() as register):
            return device_reports.register(fabric, register)
        case Reported(rank=rank, report=Knobs() as offered):
            return lifecycle.offers(fabric, rank, offered)
        case Reported(rank=rank, report=Saved() as saved):
            return checkpoint_reports.saved(fabric, rank, saved)
        case Reported(rank=rank, report=SaveFailed() as failed):
            return checkpoint_reports.failed(fabric, rank, failed)
        case Reported(rank=rank, report=Resumed() as resumed):
            return checkpoint_reports.resumed(fabric, rank, resumed)
        case Asked(ask=SetKnobs() as ask, reply=reply):
            return requests.set_knobs(fabric, ask, reply)
        case Asked(ask=Revert() as ask, reply=reply):
            return requests.revert(fabric, ask, reply)
        case Asked(ask=Steer(verb="pause" | "stop" | "checkpoint") as ask, reply=reply):
            return requests.act(fabric, ask, reply)
        case Asked(ask=Steer() as ask, reply=reply):
            return orders.give(fabric, ask, reply)
        case Asked(ask=Submit() as ask):
            return submission.submit(fabric, ask)
        case Asked(ask=Cancel() as ask):
            return submission.cancel(fabric, ask, now)
        case Asked(ask=Drain() as ask):
            return submission.drain(fabric, ask)
        case Asked(ask=EvictReplica() as ask):
            return drain.evict_replica(fabric, ask, now)
        case Asked(ask=DrainReplica() as ask):
            return drain.drain_replica(fabric, ask)
        case Reported(rank=rank, report=Joined() | Regrouped() | Healed() | Discarded() as said):
            return members.reported(fabric, rank, said)
        case LighthouseHeard(job=job):
            return members.lighthouse_heard(fabric, job)
        case NodeHeard(node=node):
            return reconcile.heard(fabric, node)
        case RunDue(job=job, hang=hang):
            return _due(fabric, job, hang, now)
        case JobDue(job=job, hang=hang):
            return hangs.look_at_job(fabric, job, hang, now)
        case Found(rank=rank, found=found):
            return findings.found(fabric, rank, found, now)
        case Replied(reply=reply):
            return _replied(fabric, reply)
        case VerdictKnown(change=change, commit=commit, abort=abort):
            return two_phase_commit.verdict_known(fabric, change, commit, abort)
        case RollCalled():
            return lifecycle.roll_called(fabric, now)
        case FellSilent(ranks=silent):
            return timers.fell_silent(fabric, silent, now)
        case Tick():
            return timers.tick(fabric, now)
        case TookOver(weaver=weaver):
            term = fabric.term + 1
            return Decision((TermBegan(term=term, weaver=weaver),))
    raise AssertionError(f"no rule for {event!r}")


def _due(fabric: Fabric, job: str, hang: Verdict | None, now: float) -> Decision:
    run = fabric.runs.active(job)
    decision = reconcile.due(fabric, job, hang, now)
    return decision if decision or run is None or not run.drained else drain.ask_to_leave(fabric, run)


def _replied(fabric: Fabric, reply: Reply) -> Decision:
    course = fabric.watch.courses.find(reply.id)
    if course is None:
        return NOTHING
    match reply:
        case Standing():
            return two_phase_commit.standing(fabric, course)
        case Ready():
            return two_phase_commit.ready(fabric, course)
        case Applied():
            return two_phase_commit.applied(fabric, course)
        case Ordered():
            return orders.ordered(fabric, course)
