"""What can happen: everything `decide` is asked about."""

from __future__ import annotations

from dataclasses import dataclass

from torchloom.messages import Ask, Beat, Fact, RankId, Reply, Report


@dataclass(frozen=True, slots=True)
class Reported:
    """What a rank reports, read from the durable inbox."""

    rank: RankId
    report: Report


@dataclass(frozen=True, slots=True)
class FactTold:
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
    """A beat that is news: from someone unknown, muted or missing. (Ordinary beats only touch the watch.)"""

    rank: RankId
    beat: Beat


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
    reason: str


@dataclass(frozen=True, slots=True)
class NodeHeard:
    """An agent spoke; the watch has taken it in."""

    node: str


@dataclass(frozen=True, slots=True)
class RunDue:
    """Time passed for a run, or an agent of it spoke."""

    job: str


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

    thorough: bool = True
    """Look at everyone, not only at those whose time is up."""


@dataclass(frozen=True, slots=True)
class TookOver:
    """This process becomes the weaver."""

    weaver: str


Event = (
    Reported
    | FactTold
    | Asked
    | Heard
    | Replied
    | VerdictKnown
    | NodeHeard
    | RunDue
    | LinkOpened
    | LinkClosed
    | RollCalled
    | Tick
    | TookOver
)
