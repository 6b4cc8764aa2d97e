"""What a rank has that outlives a connection, and what it reports of it: the hello, and a beat once a second."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from torchloom.data import training_loader
from torchloom.protocol.ids import RankId
from torchloom.protocol.lighthouse import LighthouseBeat
from torchloom.protocol.rank import Beat, Hello, Joined, Knobs, StepReport, Value
from torchloom.shared.process_id import process_id
from torchloom.threadlet.changes.step_boundary import StepBoundary
from torchloom.threadlet.connection.outbox import Outbox
from torchloom.threadlet.metrics.liveness import LivenessPageWriter, count_collectives
from torchloom.threadlet.metrics.readings import Reader
from torchloom.threadlet.process.exit_reason import Ending
from torchloom.threadlet.process.hardware import device_free_mb, device_mb, free_mb, rss_mb
from torchloom.threadlet.process.identity import Names
from torchloom.version import __version__

READ_SECONDS = 0.2
"""Longest wait for a device to give up a number."""
_STEP = 10**6
"""Of a torchft replica, collectives are counted within a step; this is more than any step has."""


@dataclass
class Membership:
    """The rank's replica under torchft. Written by the integration with torchft, read by the link thread."""

    joined: Joined | None = None
    """Reported after every hello; None if torchft does not provide the id of the replica."""
    hear: Callable[[LighthouseBeat], None] = lambda _: None
    """Called on the link thread with each beat of the job's lighthouse; must not block."""
    quorum: int | None = None
    participants: int | None = None
    discarded: int = 0
    begun: int = 0
    """Collective operations started in the current step: the rank with the fewest is the one that others wait for."""


@dataclass
class RankState:
    """One incarnation of a rank, kept from connection to connection."""

    names: Names
    boundary: StepBoundary
    liveness: LivenessPageWriter
    beat_seconds: float
    devices: tuple[str, ...] | None
    """As the script names them; otherwise None until they are found."""
    reader: Reader = field(default_factory=Reader)
    outbox: Outbox = field(default_factory=Outbox)
    welcomed: bool = False
    started: threading.Event = field(default_factory=threading.Event)
    """Welcomed, or there is no server."""
    term: int = 0
    """The highest term received; a weaver with a lower one was replaced."""
    hellos: int = 0
    complained: bool = False
    """The user was warned that a value given to step() cannot be reported."""
    member: Membership | None = None
    """None if the rank is not part of a torchft replica."""
    leaving: asyncio.Event = field(default_factory=asyncio.Event)
    ending: Ending = field(default_factory=Ending)
    """Why it leaves."""
    leave_by: float = 0.0
    """When the training stops waiting for the goodbye, on the monotonic clock."""

    @property
    def rank(self) -> RankId:
        return self.names.rank

    @property
    def incarnation(self) -> str:
        return self.boundary.participant.incarnation

    def hello(self) -> Hello:
        return Hello(
            incarnation=self.incarnation,
            node=self.names.node,
            pid=os.getpid(),
            devices=self.devices or (),
            world_size=self.names.world_size,
            launcher=self.names.launcher,
            version=__version__,
            step=self.boundary.meter.step_number,
            counted=self.boundary.counted,
            process=process_id(),
        )

    def offer(self) -> Knobs:
        """What may be changed here."""
        specs = tuple(knob.spec for knob in list(self.boundary.knobs.values())[:128])
        return Knobs(incarnation=self.incarnation, knobs=specs, checkpoints=self.boundary.save is not None)

    def report_step(self, id: str) -> StepReport:
        return StepReport(
            incarnation=self.incarnation,
            id=id,
            step=self.boundary.meter.step_number,
            step_seconds=self.boundary.meter.median_step_seconds(),
            paused=self.boundary.participant.paused,
            knobs=self._values(),
        )

    def _values(self) -> dict[str, Value]:
        """The values of the knobs, which the first rank reports for all."""
        return self.boundary.values() if self.rank.rank == 0 else {}

    async def beat(self) -> Beat:
        """The steps since the last beat, and everything else as it is now."""
        meter, boundary, readings = self.boundary.meter, self.boundary, self.reader
        stretch = meter.take()
        await readings.refresh(meter.values.copy(), READ_SECONDS, tuple(meter.losses))
        member = self.member or Membership()
        collectives = count_collectives() if self.member is None else stretch.step * _STEP + member.begun
        return Beat(
            incarnation=self.incarnation,
            step=stretch.step,
            times=stretch.times,
            loss=readings.loss,
            samples_per_second=stretch.samples_per_second,
            metrics=readings.metrics,
            not_finite=tuple(sorted(readings.not_finite)),
            bad_steps=readings.bad_steps,
            rss_mb=rss_mb(),
            device_mb=device_mb(),
            free_mb=free_mb(),
            device_free_mb=device_free_mb(),
            dropped=meter.dropped + readings.dropped,
            change=boundary.participant.in_force,
            paused=boundary.participant.paused,
            knobs=self._values(),
            idle_seconds=meter.idle_seconds(),
            phase=self.liveness.phase,
            collectives=collectives,
            quorum=member.quorum,
            participants=member.participants,
            discarded=member.discarded,
            loading=training_loader.measure(),
        )
