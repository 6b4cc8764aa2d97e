"""What can happen: the events that `decide` handles."""

from __future__ import annotations

import msgspec

from torchloom.core.detect.detector import Finding
from torchloom.core.detect.hang import HangDiagnosis
from torchloom.core.scheduling.loader_scheduler import Command
from torchloom.protocol.facts import Fact
from torchloom.protocol.ids import RankId
from torchloom.protocol.operator import Ask
from torchloom.protocol.rank import Beat, Reply, Report
from torchloom.protocol.records import Abort
from torchloom.protocol.scheduling import LoadersAllocated


class Event(msgspec.Struct, frozen=True):
    """Base of all events."""


class ReportReceived(Event, frozen=True):
    """A report of a rank, from the durable inbox."""

    rank: RankId
    report: Report


class FactReceived(Event, frozen=True):
    """A fact that an agent or a monitoring system reported, from the durable inbox."""

    fact: Fact


class RequestReceived(Event, frozen=True):
    """An operator requests something and waits for the answer."""

    ask: Ask
    reply: str = ""
    """The subject on which the answer is expected."""


class BeatReceived(Event, frozen=True):
    """A beat that needs a decision: from an unknown, muted or missing rank, or with findings."""

    rank: RankId
    beat: Beat
    findings: tuple[Finding, ...] = ()
    """What the detectors of the rank have found."""


class ReplyReceived(Event, frozen=True):
    """A rank answered a command; its pending operation has stored the reply."""

    rank: RankId
    reply: Reply


class VerdictKnown(Event, frozen=True):
    """The verdict on a change that the server has stored."""

    change: str
    commit: bool
    abort: Abort | None = None
    """Why the weaver requested an abort, if it did."""


class NodeBeatReceived(Event, frozen=True):
    """An agent sent a beat that differs from the last one; the runtime state has stored it."""

    node: str


class LighthouseBeatReceived(Event, frozen=True):
    """The lighthouse of a job sent a beat; the runtime state has stored it."""

    job: str


class RunDue(Event, frozen=True):
    """Time passed for a run, or one of its agents sent a beat."""

    job: str
    hang: HangDiagnosis | None = None
    """Ranks of it that make no step, as diagnosed just now."""


class JobDue(Event, frozen=True):
    """Time passed for a job that torchLoom did not start."""

    job: str
    hang: HangDiagnosis | None = None


class RanksSilent(Event, frozen=True):
    """These ranks have sent nothing for too long."""

    ranks: tuple[RankId, ...]


class FindingsMade(Event, frozen=True):
    """Findings about a rank, from comparing the ranks of a job."""

    rank: RankId
    findings: tuple[Finding, ...]


class LoadersDue(Event, frozen=True):
    """The loader scheduler has decided."""

    allocated: LoadersAllocated | None
    commands: tuple[Command, ...] = ()


class LinkEvent(Event, frozen=True):
    """The server announced a connect or a disconnect."""

    rank: RankId
    incarnation: str
    link: str


class LinkOpened(LinkEvent, frozen=True):
    """The incarnation has one more connection."""


class LinkClosed(LinkEvent, frozen=True):
    reason: str


class RollCalled(Event, frozen=True):
    """The server has listed who is connected, after the weaver had been away."""


class Tick(Event, frozen=True):
    """Time passed."""


class TookOver(Event, frozen=True):
    """This process becomes the weaver."""

    weaver: str
