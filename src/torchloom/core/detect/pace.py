"""How long a step of one rank may take, learnt from its own steps.

Nothing is known before the first few steps: one of them may compile, or wait for a peer that is still loading. Then

    limit = max(floor, factor × p99 of its recent steps, 1.5 × the longest pause that it has come back from)

The p99 follows the rank both ways over some minutes: it is the upper end of what the latest beats said, so that a few
stray beats do not move it. A pause is a step far longer than those. An evaluation at the end of each epoch is one, so
pauses must not be forgotten like steps: each is remembered for twice the time in which there had been none of its size
(and an hour). One that comes every three hours is thus known from its first time on; one of a kind fades.
"""

from __future__ import annotations

import math
from array import array

from torchloom.core.detect.data import DATA
from torchloom.messages import Beat
from torchloom.settings import Settings

FEW_STEPS = 5
FEW_BEATS = 3
KEPT = 64
STRIDE = 4
"""Beats of which the slowest is kept: with 64 of them, about four minutes."""
UPPER = 0.95
NOTABLE = 2.0
"""A step this many times longer than the slow ones is a pause."""
HOUR = 3600.0
MARGIN = 1.5


class Pace:
    __slots__ = ("_beats", "_began", "_excused", "_notable", "_p99s", "_pauses", "_slowest", "longest", "p99", "steps")

    def __init__(self) -> None:
        self.steps = 0
        """Finished in this life, as far as they were heard of."""
        self.p99 = 0.0
        """Of its recent steps, in seconds."""
        self.longest = 0.0
        """The longest pause it has come back from in this life."""
        self._beats = 0
        self._began = math.nan
        self._excused = False
        """The next step was not only a step: what it took is no measure."""
        self._notable = 0.0
        self._p99s = array("d")
        self._slowest = 0.0
        self._pauses: dict[int, tuple[float, float, float]] = {}
        """Magnitude → (when last, how long at most, remembered until). A magnitude is a power of two."""

    @property
    def started(self) -> bool:
        return self.steps >= FEW_STEPS and self._beats >= FEW_BEATS and self.p99 > 0

    @property
    def pause(self) -> float:
        """The longest this rank is known to have stood still and gone on by itself."""
        return max(self.p99, self.longest)

    def limit(self, settings: Settings) -> float:
        """How long it may stay at one step before something is wrong, in seconds."""
        if not self.started:
            return settings.first_step_seconds
        remembered = max((seconds for _, seconds, _ in self._pauses.values()), default=0.0)
        return max(settings.hang_floor_seconds, settings.hang_factor * self.p99, MARGIN * remembered)

    def excuse(self) -> None:
        """It was paused, stopped by hand or busy with something else: learn nothing from how long that took."""
        self._excused = True

    def hear(self, beat: Beat, now: float) -> None:
        times = beat.times
        if beat.paused or (beat.phase and beat.phase != DATA):
            self._excused = True
        elif times is not None:
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
            beats = self._beats = self._beats + 1
            if beats % STRIDE == 0 or beats < KEPT // STRIDE:
                self._p99s.append(self._slowest)
                self._slowest = 0.0
                if beats % (4 * STRIDE) == 0 or beats < KEPT // STRIDE:
                    self._learn(now)

    def _learn(self, now: float) -> None:
        del self._p99s[:-KEPT]
        ordered = sorted(self._p99s)
        self.p99 = ordered[int(UPPER * (len(ordered) - 1))]
        if self._pauses:
            self._pauses = {size: pause for size, pause in self._pauses.items() if pause[2] > now}
        known = max((seconds for _, seconds, _ in self._pauses.values()), default=0.0)
        self._notable = max(NOTABLE * self.p99, known / 2)

    def _remember(self, seconds: float, now: float) -> None:
        if not self._beats:
            self._began = now
            return  # the first steps are no measure
        size = math.frexp(seconds)[1]
        before = [at for known, (at, _, _) in self._pauses.items() if known >= size - 1]
        quiet = now - max(before, default=self._began)
        until = now + max(HOUR, 2 * quiet)
        _, most, longer = self._pauses.get(size, (now, 0.0, until))
        self._pauses[size] = (now, max(seconds, most), max(until, longer))
        self.longest = max(self.longest, seconds)
        self._notable = max(self._notable, seconds / 2)
