"""What is learnt of one life of a rank from its beats. A next life begins with new senses.

This runs for every beat of every rank, a hundred thousand times a second in a large fleet. So each detector compares
with a bound first, and statistics are made only every few beats or when a bound is passed.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence

from torchloom.core.detect.data import DATA, Hunger
from torchloom.core.detect.finding import Finding
from torchloom.core.detect.memory import Creep
from torchloom.core.detect.numbers import GRADIENT_SHARE, LOSS_SHARE, Finite, Level, is_gradient
from torchloom.core.detect.pace import Pace
from torchloom.core.detect.straggler import kept
from torchloom.core.detect.throughput import Throughput
from torchloom.messages import Beat
from torchloom.settings import Settings

_NOTHING: tuple[Finding, ...] = ()


class Senses:
    __slots__ = (
        "_creep", "_device", "_finite", "_gradient", "_gradient_name", "_hunger", "_loss", "_metrics", "_own",
        "_throughput", "_well", "device_limit_mb", "limit_mb", "pace", "settings",
    )  # fmt: skip

    def __init__(self, settings: Settings, limit_mb: float = math.inf, device_limit_mb: float = math.inf) -> None:
        self.limit_mb = limit_mb
        """What its process may grow to: what it has and what the machine has left. Set it anew as that changes."""
        self.device_limit_mb = device_limit_mb
        self.pace = Pace()
        self.settings = settings
        self._finite: Finite | None = None
        """While a number is not finite."""
        self._well: Beat | None = None
        """The last that told a loss."""
        self._loss = Level("loss_spike", settings.spike_factor, LOSS_SHARE)
        self._gradient: Level | None = None
        self._gradient_name = ""
        self._metrics = 0
        """How many metrics there were when a gradient norm was last looked for."""
        self._creep = Creep("memory of the process")
        self._device: Creep | None = None
        self._hunger = Hunger()
        self._throughput = Throughput()
        self._own: deque[float] = deque(maxlen=kept(settings))

    @property
    def own(self) -> Sequence[float]:
        """What the rank itself needed for a step, in the latest beats: for `straggler.Race`."""
        return self._own

    def hear(self, beat: Beat, now: float) -> tuple[Finding, ...]:
        """What has begun or is over with this beat; mostly nothing."""
        times = beat.times
        self.pace.hear(beat, now)
        found: list[Finding | None] | None = None
        if beat.not_finite or self._finite is not None:
            found = [self._hear_finite(beat), self._overflow(beat)]
        if times is None or beat.paused or (beat.phase and beat.phase != DATA):
            return tuple(filter(None, found)) if found else _NOTHING
        settings = self.settings
        if beat.loss is not None:
            self._well = beat
            one = self._loss.hear("loss", beat.loss, beat.step)
            if one is not None:
                found = [*(found or ()), one]
        metrics = beat.metrics
        if metrics:
            if len(metrics) != self._metrics:
                self._metrics = len(metrics)
                self._gradient_name = next(filter(is_gradient, metrics), "")
            norm = metrics.get(self._gradient_name)
            if norm is not None:
                gradient = self._gradient or self._gradient_level()
                one = gradient.hear(self._gradient_name, norm, beat.step)
                if one is not None:
                    found = [*(found or ()), one]
        one = self._throughput.hear(beat, times, settings.slowdown_factor)
        if one is not None:
            found = [*(found or ()), one]
        if times.data is not None:
            one = self._hunger.hear(times, times.data, settings.starved_share, beat.step)
            if one is not None:
                found = [*(found or ()), one]
        if times.own is not None:
            self._own.append(times.own)
        free = beat.free_mb
        limit = self.limit_mb if free is None else beat.rss_mb + free
        one = self._creep.hear(beat.rss_mb, limit, now, settings.memory_horizon_seconds)
        if one is not None:
            found = [*(found or ()), one]
        if beat.device_mb is not None:
            device = self._device or self._device_creep()
            free = beat.device_free_mb
            limit = self.device_limit_mb if free is None else beat.device_mb + free
            one = device.hear(beat.device_mb, limit, now, settings.memory_horizon_seconds)
            if one is not None:
                found = [*(found or ()), one]
        return tuple(filter(None, found)) if found else _NOTHING

    def _hear_finite(self, beat: Beat) -> Finding | None:
        finite = self._finite or Finite()
        found = finite.hear(beat, self._well)
        self._finite = finite if finite.ill else None
        return found

    def _overflow(self, beat: Beat) -> Finding | None:
        bad = next(filter(is_gradient, beat.not_finite), None)
        return None if bad is None or beat.times is None else self._gradient_level().overflowed(bad, beat.step)

    def _gradient_level(self) -> Level:
        if self._gradient is None:
            self._gradient = Level("gradient", self.settings.spike_factor, GRADIENT_SHARE)
        return self._gradient

    def _device_creep(self) -> Creep:
        self._device = Creep("memory of the device")
        return self._device
