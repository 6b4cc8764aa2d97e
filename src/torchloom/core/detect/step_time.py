"""How long a step of one rank may take, learnt from its own steps.

Nothing is known before the first few steps: one of them may compile, or wait for a peer that is still loading. Then

    limit = max(floor, factor × p99 of its recent steps, 1.5 × the longest pause that it has come back from)

The p99 follows the rank both ways over some minutes: it is the upper end of what the latest beats said, so that a few
stray beats do not move it. A pause is a step far longer than those. An evaluation at the end of each epoch is one, so
pauses must not be forgotten like steps: each is remembered for twice the time in which there had been none of its size
(and an hour). One that comes every three hours is thus known from its first time on; one of a kind fades.

Where steps take milliseconds, some step of nearly every beat is a pause by that measure. Pauses that are short against
the floor change nothing, neither the limit nor for how long a longer one is remembered, and are not looked at.
"""

from __future__ import annotations

import math
from array import array
from dataclasses import dataclass, field

from torchloom.core.detect.detector import Block
from torchloom.protocol.rank import StepTimes
from torchloom.settings import Settings

FEW_STEPS = 5
FEW_BEATS = 3
KEPT = 64
STRIDE = 4
"""Beats of which the slowest is kept: with 64 of them, about four minutes."""
LEARN_EVERY = 8 * STRIDE
"""Beats, …"""
SINGLY = 16
"""… after these, which are kept and learnt from one by one."""
UPPER = 0.95
NOTABLE = 2.0
"""A step this many times longer than the slow ones is a pause."""
HOUR = 3600.0
MARGIN = 1.5
SHORT = 1 / (4 * MARGIN)
"""Share of the floor. A pause that moves the limit is longer than floor / MARGIN; those that say how rare its size is
are longer than a quarter of it."""


@dataclass(slots=True)
class StepTimeBaseline:
    settings: Settings
    steps: int = 0
    """Finished in this life, at least: of a beat in a block, one is counted."""
    p99: float = 0.0
    """Of its recent steps, in seconds."""
    longest: float = 0.0
    """The longest pause it has come back from in this life, of those that are not short."""
    _beats: int = 0
    _full: int = 1
    """The number of the beat with which the stride ends."""
    _lesson: int = SINGLY
    """And of that from which on the p99 is learnt again."""
    _began: float = math.nan
    _excused: bool = False
    """The next step was not only a step: what it took is no measure."""
    _notable: float = 0.0
    _p99s: array[float] = field(default_factory=lambda: array("d"))
    _slowest: float = 0.0
    _pauses: dict[int, tuple[float, float, float]] = field(default_factory=dict)
    """Magnitude → (when last, how long at most, remembered until). A magnitude is a power of two."""

    @property
    def started(self) -> bool:
        return self.steps >= FEW_STEPS and self._beats >= FEW_BEATS and self.p99 > 0

    @property
    def pause(self) -> float:
        """The longest pause from which this rank has resumed by itself."""
        return max(self.p99, self.longest)

    def limit(self, settings: Settings) -> float:
        """How long it may stay at one step before something is wrong, in seconds."""
        if not self.started:
            return settings.first_step_seconds
        return max(settings.hang_floor_seconds, settings.hang_factor * self.p99, MARGIN * self._longest_pause())

    def excuse(self) -> None:
        """It was paused, stopped by hand or busy with something else: learn nothing from how long that took."""
        self._excused = True

    @property
    def notable(self) -> float:
        """A step that takes no longer needs no examination."""
        return -math.inf if self._excused else self._notable

    def learn(self, block: Block) -> None:
        p99, beats = block.p99, len(block.p99)
        self.steps += beats
        slowest = [max(p99[begin : begin + STRIDE]) for begin in range(0, beats, STRIDE)]
        slowest[0] = max(slowest[0], self._slowest)
        self._beats += beats
        rest = beats % STRIDE
        self._slowest = slowest.pop() if rest else 0.0
        if slowest:
            self._p99s.fromlist(slowest)
            self._full = self._beats - rest + STRIDE
            if self._beats < SINGLY or self._beats >= self._lesson:
                self._learn(block.at[-1])
        elif self._beats >= self._full:  # where phases are frequent, each block may be shorter than a stride
            self._end_stride(block.at[-1])

    def hear(self, times: StepTimes, now: float) -> None:
        """The steps since it was last heard."""
        self.steps += times.count
        slow = times.p99
        if self._excused:
            self._excused = False
            if times.count < 3:
                return
            slow = times.p50  # the one long step among them does not move it
        elif times.longest > self._notable:
            self._remember(times.longest, now)
        self._slowest = max(self._slowest, slow)
        self._beats += 1
        if self._beats >= self._full:
            self._end_stride(now)

    def _end_stride(self, now: float) -> None:
        self._p99s.append(self._slowest)
        self._slowest = 0.0
        singly = self._beats < SINGLY
        self._full = self._beats + (1 if singly else STRIDE)
        if singly or self._beats >= self._lesson:
            self._learn(now)

    def _learn(self, now: float) -> None:
        self._lesson = self._beats + LEARN_EVERY
        del self._p99s[:-KEPT]
        ordered = sorted(self._p99s)
        self.p99 = ordered[int(UPPER * (len(ordered) - 1))]
        if self._pauses:
            self._pauses = {size: pause for size, pause in self._pauses.items() if pause[2] > now}
        self._notable = max(NOTABLE * self.p99, self._longest_pause() / 2, SHORT * self.settings.hang_floor_seconds)

    def _longest_pause(self) -> float:
        """Of those that are still remembered."""
        return max([seconds for _, seconds, _ in self._pauses.values()]) if self._pauses else 0.0

    def _remember(self, seconds: float, now: float) -> None:
        if not self._beats:
            self._began = now
            return  # the first steps are no measure
        size = math.frexp(seconds)[1]
        before = [at for other, (at, _, _) in self._pauses.items() if other >= size - 1]
        quiet = now - max(before, default=self._began)
        until = now + max(HOUR, 2 * quiet)
        _, most, longer = self._pauses.get(size, (now, 0.0, until))
        self._pauses[size] = (now, max(seconds, most), max(until, longer))
        self.longest = max(self.longest, seconds)
        self._notable = max(self._notable, seconds / 2)
