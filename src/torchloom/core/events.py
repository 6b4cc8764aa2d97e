"""What can happen: everything `decide` is asked about."""

from __future__ import annotations

from dataclasses import dataclass

from torchloom.core.detect.finding import Finding
from torchloom.core.detect.hang import HangDiagnosis
from torchloom.protocol.facts import Fact
from torchloom.protocol.ids import RankId
from torchloom.protocol.operator import Ask
from torchloom.protocol.rank import Beat, Reply, Report
from torchloom.protocol.records import Abort


@dataclass(frozen=True, slots=True)
class Reported:
    """What a rank reports, read from the durable inbox."""

    rank: RankId
    report: Report


@dataclass(frozen=True, slots=True)
class FactReported:
    """An agent or a monitoring system says something, through the durable inbox."""

    fact: Fact


@dataclass(frozen=True, slots=True)
class Asked:
    """An operator wants something and waits for the answer."""

    ask: Ask
    reply: str = ""
    """Where."""


@dataclass(frozen=True, slots=True)
class Heard:
    """A beat that is news: from someone unknown, muted or missing, or telling of trouble. (Others touch the watch.)"""

    rank: RankId
    beat: Beat
    found: tuple[Finding, ...] = ()
    """What the watch has found in it, of a known life."""


@dataclass(frozen=True, slots=True)
class Replied:
    """A rank answered a command; the course it belongs to has taken it in."""

    rank: RankId
    reply: Reply


@dataclass(frozen=True, slots=True)
class VerdictKnown:
    """The server let this verdict on a change stand."""

    change: str
    commit: bool
    abort: Abort | None = None
    """Why the weaver wanted an abort, if it did."""


@dataclass(frozen=True, slots=True)
class NodeHeard:
    """An agent spoke; the watch has taken it in."""

    node: str


@dataclass(frozen=True, slots=True)
class LighthouseHeard:
    """The lighthouse of a job spoke; the watch has taken it in."""

    job: str


@dataclass(frozen=True, slots=True)
class RunDue:
    """Time passed for a run, or an agent of it spoke."""

    job: str
    hang: HangDiagnosis | None = None
    """Ranks of it that make no step, as the watch sees it now."""


@dataclass(frozen=True, slots=True)
class JobDue:
    """Time passed for a job that others started."""

    job: str
    hang: HangDiagnosis | None = None


@dataclass(frozen=True, slots=True)
class FellSilent:
    """These ranks have not been heard for long."""

    ranks: tuple[RankId, ...]


@dataclass(frozen=True, slots=True)
class Found:
    """Comparing the ranks of a job has shown something."""

    rank: RankId
    found: tuple[Finding, ...]


@dataclass(frozen=True, slots=True)
class LinkOpened:
    rank: RankId
    incarnation: str
    link: str


@dataclass(frozen=True, slots=True)
class LinkClosed:
    rank: RankId
    incarnation: str
    link: str
    reason: str


@dataclass(frozen=True, slots=True)
class RollCalled:
    """The watch has heard from the server who is connected, after the weaver had been away."""


@dataclass(frozen=True, slots=True)
class Tick:
    """Time passed."""


@dataclass(frozen=True, slots=True)
class TookOver:
    """This process becomes the weaver."""

    weaver: str


Event = (
    Reported
    | FactReported
    | Asked
    | Heard
    | Replied
    | VerdictKnown
    | NodeHeard
    | LighthouseHeard
    | RunDue
    | JobDue
    | FellSilent
    | Found
    | LinkOpened
    | LinkClosed
    | RollCalled
    | Tick
    | TookOver
)
