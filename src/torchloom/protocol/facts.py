"""Facts that third parties report to the weaver: failed devices, exited processes, stacks."""

from __future__ import annotations

from typing import Annotated, Final, Literal

from msgspec import Meta

from torchloom.protocol.ids import Incarnation, Name, RankNumber, Seconds, Text
from torchloom.protocol.message import Message, Part
from torchloom.protocol.phrase import Statement

AlertName = Annotated[str, Meta(max_length=64)]


class DeviceReport(Message, frozen=True):
    """Base of what a source says about whether a device works."""

    device: Name
    source: Text = "monitoring"
    alert: AlertName = ""
    """The alert that says so, under the name it has also when it is over; empty: the source itself."""
    began: Seconds = 0.0
    """Which time the alert fires: when it began to."""


class DeviceFailed(DeviceReport, frozen=True):
    """A monitoring system, an agent or a person says that a device is broken."""

    cause: Statement = "unspecified"


class DeviceRecovered(DeviceReport, frozen=True):
    """The source that reported a device as broken takes that back. The device works again when no source reports it."""


ALL_OVER: Final = "all"
"""Of a DeviceWarned that is over: no earlier warning about this device holds any more."""


class DeviceWarned(Message, frozen=True):
    """A device is not broken but not well: too hot, throttled, losing memory rows. Or it is well again."""

    device: Name
    what: Annotated[str, Meta(max_length=64)]
    """Which condition, in a word: the same at its end. At an end also ALL_OVER."""
    detail: Statement = ""
    source: Text = "monitoring"
    over: bool = False


class RankStacks(Part, frozen=True):
    """Where the threads of a rank are, or why that is unknown."""

    rank: RankNumber
    how: Literal["itself", "signal", "py-spy", "none"]
    """The rank answered; by a signal, while its interpreter was held; py-spy read it from outside; not at all."""
    text: Annotated[str, Meta(max_length=20_000)] = ""
    state: Statement = ""
    """Of the process, as the kernel sees it."""
    said: Text = ""
    """The last lines it wrote to stderr."""


class Inspected(Message, frozen=True):
    """What an agent found when it looked at the ranks of a job, for an incident."""

    job: Name
    node: Name
    incident: Name
    ranks: Annotated[tuple[RankStacks, ...], Meta(max_length=1024)] = ()
    host: Statement = ""
    """Load, memory and pressure of the machine."""


class RankExited(Message, frozen=True):
    """Someone who can know, an agent or the kernel, saw the process end. No grace is needed then."""

    job: Name
    replica: Name
    rank: RankNumber
    incarnation: Incarnation
    exit_code: int | None = None
    signal: Annotated[str, Meta(max_length=32)] = ""
    evidence: Text = ""


Fact = DeviceFailed | DeviceRecovered | DeviceWarned | RankExited | Inspected
