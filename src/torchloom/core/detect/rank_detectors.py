"""The detectors that learn from the beats of one incarnation of a rank. The next incarnation gets new ones.

This runs for every beat of every rank, a hundred thousand times a second in a large fleet. So it is cheap where nothing
is wrong. Each detector says within which limits there is nothing for it to examine:

    an ordinary beat    is within all limits: it is put aside, and with others makes a block to learn from
    any other beat      is examined by all detectors at once, after they have learnt from what was put aside

No limit moves while beats are put aside. A detector that is suspicious, has reported a finding, or knows too little yet
sets a limit that no beat is within, and so examines each beat. A loss or gradient norm above its limit may stay there
for minutes, and says nothing about the rest of the beat: only its own detector examines it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable

from torchloom.core.detect.bad_numbers import GradientSpikeDetector, NonFiniteDetector, SpikeDetector
from torchloom.core.detect.detector import CLOSED, Block, Detector, Finding
from torchloom.core.detect.kinds_and_responses import DETECTORS
from torchloom.core.detect.loader_trouble import LoaderTroubleDetector
from torchloom.core.detect.memory_leak import MemoryLeakDetector
from torchloom.core.detect.slow_steps import DATA, SlowdownDetector, StarvationDetector
from torchloom.core.detect.step_time import StepTimeBaseline
from torchloom.core.detect.straggler import kept
from torchloom.protocol.phrase import phrase
from torchloom.protocol.rank import Beat, StepTimes
from torchloom.settings import Settings

BLOCK = 16
"""Ordinary beats that are learnt from together: so much later, in beats, their statistics follow."""
_TRAINING = ("", DATA)
_Row = tuple[float, float, float, float, float | None, float | None]
"""What is put aside of one beat: a value for each column of Block. The rest of a block is taken from its last beat."""
_Limits = tuple[float, float, float, float, float, float, float, float, str, int, int]


class RankDetectors:
    __slots__ = (
        "_aside", "_device", "_finite", "_gradient", "_hunger", "_last", "_limits", "_loader", "_loss", "_memory",
        "_registered", "_throughput", "_well", "own", "pace",
    )  # fmt: skip

    def __init__(self, settings: Settings, registered: Iterable[Callable[[Settings], Detector]] = DETECTORS) -> None:
        self.pace = StepTimeBaseline(settings)
        self.own: deque[float] = deque(maxlen=kept(settings))
        """What the rank itself needed for a step, in the latest beats: for `straggler.StragglerDetector`."""
        self._finite = NonFiniteDetector()
        self._well: Beat | None = None
        """The last that told a loss."""
        self._loss = SpikeDetector("loss_spike", settings)
        self._gradient = GradientSpikeDetector("gradient", settings)
        self._throughput = SlowdownDetector(settings)
        self._hunger = StarvationDetector(settings)
        self._loader = LoaderTroubleDetector()
        self._memory = MemoryLeakDetector(phrase("memory_of_process"), settings)
        self._device = MemoryLeakDetector(phrase("memory_of_device"), settings)
        self._registered = tuple(detector(settings) for detector in registered)
        self._aside: list[_Row] = []
        self._last: Beat
        """The last of them."""
        self._limits = self._limit()

    def excuse(self) -> None:
        """The rank was stopped by hand or busy with something else: how long its next step takes is no measure."""
        self._learn()
        self.pace.excuse()
        self._limits = self._limit()

    def hear(self, beat: Beat, now: float) -> tuple[Finding, ...]:
        """What has begun or is over with this beat; mostly nothing."""
        loading = beat.loading
        if loading is not None and (loading.trouble is not None or self._loader.is_open is not None):
            return (*self._loader.hear(beat), *self._hear_steps(beat, now))
        return self._hear_steps(beat, now)

    def _hear_steps(self, beat: Beat, now: float) -> tuple[Finding, ...]:
        times = beat.times
        if beat.paused or beat.phase not in _TRAINING:
            self.excuse()
            return self._hear_finite(beat)
        if times is None:
            return self._hear_finite(beat)
        p50, data, loss, metrics, process, device = (
            times.p50, times.data, beat.loss, beat.metrics, beat.rss_mb, beat.device_mb
        )  # fmt: skip
        if loss is not None:
            self._well = beat
        if times.own is not None:
            self.own.append(times.own)
        (
            fastest, slowest, notable, starved, process_low, process_high, device_low, device_high, name, count, change
        ) = self._limits  # fmt: skip
        if not (
            fastest <= p50 <= slowest
            and times.longest <= notable
            and (data is None or data <= starved * p50)
            and process_low < process < process_high
            and (device is None or device_low < device < device_high)
            and len(metrics) == count
            and beat.change == change
            and not beat.not_finite
        ):
            return self._examine(beat, times, now)
        aside = self._aside
        aside.append((now, p50, times.p99, process, device, loss))
        self._last = beat
        jumped = grown = None
        if loss is not None:
            if loss < self._loss.limit:
                self._loss.aside.append(loss)
            else:
                jumped = self._loss.examine("loss", loss, beat.step)
        if (norm := metrics.get(name)) is not None:
            if norm < self._gradient.limit:
                self._gradient.aside.append(norm)
            else:
                grown = self._gradient.hear(beat)
        if len(aside) == BLOCK:
            self._learn()
            self._limits = self._limit()
        return () if jumped is None and grown is None else tuple(filter(None, (jumped, grown)))

    def _examine(self, beat: Beat, times: StepTimes, now: float) -> tuple[Finding, ...]:
        self._learn()
        self.pace.hear(times, now)
        findings = (
            *self._hear_finite(beat),
            self._loss.examine("loss", beat.loss, beat.step),
            self._gradient.hear(beat),
            self._throughput.hear(beat, times),
            self._hunger.hear(beat, times),
            self._memory.hear(now, beat.rss_mb, beat.free_mb),
            self._device.hear(now, beat.device_mb, beat.device_free_mb),
            *(detector.hear(beat, times, now) for detector in self._registered),
        )
        self._limits = self._limit()
        return tuple(filter(None, findings))

    def _hear_finite(self, beat: Beat) -> tuple[Finding, ...]:
        if not (beat.not_finite or self._finite.names):
            return ()
        finding = self._finite.hear(beat, self._well)
        self._limits = self._limit()
        return () if finding is None else (finding,)

    def _learn(self) -> None:
        """From the beats that were put aside."""
        if not self._aside:
            return
        at, p50, p99, process, device, loss = zip(*self._aside, strict=True)
        last = self._last
        block = Block(at, p50, p99, loss, last.samples_per_second)
        self._aside.clear()
        self.pace.learn(block)
        self._throughput.learn(block)
        self._memory.learn(at, process, last.free_mb)
        self._device.learn(at, device, last.device_free_mb)
        for detector in self._registered:
            detector.learn(block)
        self._loss.learn()
        self._gradient.learn()

    def _limit(self) -> _Limits:
        """Within which a beat is ordinary."""
        due = self._finite.names or any(detector.due for detector in self._registered)
        return (
            *(CLOSED if due else self._throughput.limits),
            self.pace.notable,
            self._hunger.limit,
            *self._memory.limits,
            *self._device.limits,
            self._gradient.name,
            self._gradient.metrics,
            self._throughput.change,
        )
