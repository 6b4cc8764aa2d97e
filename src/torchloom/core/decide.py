"""What follows from an event: records for the log, commands for ranks, an answer for who asked, and the reason.

`decide` looks and judges and changes nothing. What it returns is appended to the log, then folded, then sent:

    decision = decide(fabric, event, now)
    log.append(decision.records)
    fabric.fold(decision.records, now)
    bus.send(decision.commands)
"""

from __future__ import annotations

from torchloom.core import (
    changes,
    checkpoints,
    devices,
    hanging,
    leaving,
    members,
    orders,
    ranks,
    running,
    submitting,
    sweep,
    troubles,
    wishes,
)
from torchloom.core.decision import NOTHING, Decision, together
from torchloom.core.detect.hang import Verdict
from torchloom.core.device import Blame
from torchloom.core.events import (
    Asked,
    Event,
    FactTold,
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
from torchloom.core.evicting import with_responses
from torchloom.core.fabric import Fabric
from torchloom.messages import (
    Applied,
    Cancel,
    DeviceFailed,
    DeviceRecovered,
    DeviceWarned,
    Discarded,
    Drain,
    DrainReplica,
    EvictReplica,
    Fail,
    Goodbye,
    Healed,
    Hello,
    Inspected,
    Joined,
    Knobs,
    Ordered,
    RankExited,
    Ready,
    Recover,
    Register,
    Regrouped,
    Reply,
    Resumed,
    Revert,
    Saved,
    SaveFailed,
    SetKnobs,
    Standing,
    Steer,
    Submit,
    TermBegan,
)

__all__ = ["NOTHING", "Decision", "decide"]


def decide(fabric: Fabric, event: Event, now: float) -> Decision:
    return members.with_evictions(fabric, _decide(fabric, event, now))


def _decide(fabric: Fabric, event: Event, now: float) -> Decision:
    match event:
        case Heard(rank=rank, beat=beat, found=found):
            life = ranks.heard(fabric, rank, beat, now)
            return together((life, troubles.found(fabric, rank, found, now, life.opened)))
        case LinkClosed(rank=rank, incarnation=incarnation, reason=reason):
            return ranks.link_closed(fabric, rank, incarnation, reason)
        case LinkOpened(rank=rank, incarnation=incarnation):
            return ranks.link_opened(fabric, rank, incarnation, now)
        case Reported(rank=rank, report=Hello() as hello):
            return ranks.hello(fabric, rank, hello)
        case Reported(rank=rank, report=Goodbye() as goodbye):
            return ranks.goodbye(fabric, rank, goodbye)
        case FactTold(fact=RankExited() as exited):
            return ranks.exited(fabric, exited)
        case FactTold(fact=Inspected() as inspected):
            return hanging.inspected(fabric, inspected)
        case FactTold(fact=DeviceFailed(device=device, cause=cause, source=source, alert=alert, began=began)):
            blame = Blame(by=alert or source, cause=cause, began=began, alert=bool(alert))
            return with_responses(fabric, devices.fail(fabric, device, source, blame), device, now)
        case FactTold(fact=DeviceRecovered() as recovered):
            return devices.take_back(fabric, recovered)
        case FactTold(fact=DeviceWarned() as warned):
            return with_responses(fabric, devices.warn(fabric, warned), warned.device, now)
        case Asked(ask=Fail(device=device, cause=cause, operator=operator)):
            blame = Blame(by=devices.HAND, cause=cause)
            return with_responses(fabric, devices.fail(fabric, device, operator, blame), device, now)
        case Asked(ask=Recover(device=device, operator=operator)):
            return devices.recover(fabric, device, operator)
        case Asked(ask=Register() as register):
            return devices.register(fabric, register)
        case Reported(rank=rank, report=Knobs() as offered):
            return ranks.offers(fabric, rank, offered)
        case Reported(rank=rank, report=Saved() as saved):
            return checkpoints.saved(fabric, rank, saved)
        case Reported(rank=rank, report=SaveFailed() as failed):
            return checkpoints.failed(fabric, rank, failed)
        case Reported(rank=rank, report=Resumed() as resumed):
            return checkpoints.resumed(fabric, rank, resumed)
        case Asked(ask=SetKnobs() as ask, reply=reply):
            return wishes.set_knobs(fabric, ask, reply, now)
        case Asked(ask=Revert() as ask, reply=reply):
            return wishes.revert(fabric, ask, reply, now)
        case Asked(ask=Steer(verb="pause" | "stop" | "checkpoint") as ask, reply=reply):
            return wishes.act(fabric, ask, reply, now)
        case Asked(ask=Steer() as ask, reply=reply):
            return orders.give(fabric, ask, reply, now)
        case Asked(ask=Submit() as ask):
            return submitting.submit(fabric, ask)
        case Asked(ask=Cancel() as ask):
            return submitting.cancel(fabric, ask, now)
        case Asked(ask=Drain() as ask):
            return submitting.drain(fabric, ask)
        case Asked(ask=EvictReplica() as ask):
            return leaving.evict_replica(fabric, ask, now)
        case Asked(ask=DrainReplica() as ask):
            return leaving.drain_replica(fabric, ask, now)
        case Reported(rank=rank, report=Joined() | Regrouped() | Healed() | Discarded() as said):
            return members.reported(fabric, rank, said)
        case LighthouseHeard(job=job):
            return members.lighthouse_heard(fabric, job)
        case NodeHeard(node=node):
            return running.heard(fabric, node)
        case RunDue(job=job, hang=hang):
            return _due(fabric, job, hang, now)
        case JobDue(job=job, hang=hang):
            return hanging.look_at_job(fabric, job, hang, now)
        case Found(rank=rank, found=found):
            return troubles.found(fabric, rank, found, now)
        case Replied(reply=reply):
            return _replied(fabric, reply, now)
        case VerdictKnown(change=change, commit=commit, reason=reason):
            return changes.verdict_known(fabric, change, commit, reason, now)
        case RollCalled():
            return ranks.roll_called(fabric, now)
        case Tick(thorough=thorough):
            return sweep.tick(fabric, now, thorough)
        case TookOver(weaver=weaver):
            term = fabric.term + 1
            return Decision((TermBegan(term=term, weaver=weaver),), reason=f"{weaver} takes over as term {term}")
    raise AssertionError(f"no rule for {event!r}")


def _due(fabric: Fabric, job: str, hang: Verdict | None, now: float) -> Decision:
    run = fabric.runs.active(job)
    decision = running.due(fabric, job, hang, now)
    return decision if decision or run is None or not run.drained else leaving.ask_to_leave(fabric, run, now)


def _replied(fabric: Fabric, reply: Reply, now: float) -> Decision:
    course = fabric.watch.courses.find(reply.id)
    if course is None:
        return NOTHING
    match reply:
        case Standing():
            return changes.standing(fabric, course)
        case Ready():
            return changes.ready(fabric, course, now)
        case Applied():
            return changes.applied(fabric, course)
        case Ordered():
            return orders.ordered(fabric, course)
