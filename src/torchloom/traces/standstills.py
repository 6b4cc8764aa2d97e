"""How long training stood still, and why: pure, from the records of the log and the steps that beats report.

pause      from when all ranks had paused until the order to continue was carried out
release    from the order to end the ranks until the first step of the attempt that continues
restart    from the first sign of what led to it until the first step of the next attempt
resize     the longest step while the number of loaders changed, less a usual slow step: the median of the p99 of
           the beats before. Of the ranks, the one that lost most. Noise costs nothing, and a stall is fully counted.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from statistics import median
from typing import NamedTuple

from torchloom.knob_validation import LOADERS
from torchloom.protocol import run_records as runs
from torchloom.protocol.ids import RankId
from torchloom.protocol.rank import Beat
from torchloom.protocol.records import (
    ChangeDecided,
    ChangeProposed,
    ChangeSettled,
    IncidentOpened,
    JobEnded,
    OrderEnded,
    OrderGiven,
    Record,
)
from torchloom.views.wording.phrases import render

USUAL = 5
"""Beats before a resize that say what a usual step is."""
KEPT = 32
"""Stretches of steps that are kept of each rank."""
PATIENCE_SECONDS = 30.0
"""After a resize, for beats that measure it."""


class Standstill(NamedTuple):
    """One of them, that is over."""

    began: float
    target: str
    cause: str
    seconds: float | None
    step: int | None = None
    redone: int | None = None
    before: int | None = None
    after: int | None = None
    detail: str = ""


class Steps(NamedTuple):
    """Those that a beat measured: after `first`, up to `last`."""

    first: int
    last: int
    p99: float
    longest: float


@dataclass(slots=True)
class _Pause:
    began: float
    target: str
    step: int
    detail: str
    lives: set[RankId]


@dataclass(slots=True)
class _Resize:
    proposed: ChangeProposed
    settled: float | None = None


@dataclass(slots=True)
class _Stop:
    """An attempt that was ended, and is to be followed by another one."""

    began: float
    run: str
    cause: str
    step: int
    detail: str
    redone: int | None = None


@dataclass(slots=True)
class Standstills:
    """Of one job."""

    _steps: dict[RankId, deque[Steps]] = field(default_factory=lambda: defaultdict(lambda: deque(maxlen=KEPT)))
    _changes: dict[str, ChangeProposed] = field(default_factory=dict)
    """Pauses that are not settled yet."""
    _resizes: dict[str, _Resize] = field(default_factory=dict)
    _pauses: list[_Pause] = field(default_factory=list)
    _resumes: dict[str, set[RankId]] = field(default_factory=dict)
    """By order: the ranks that are to continue."""
    _stops: dict[str, _Stop] = field(default_factory=dict)
    """By run."""
    _releases: dict[str, str] = field(default_factory=dict)
    """By run: who asked for it."""
    _incidents: dict[str, float] = field(default_factory=dict)
    """When they were opened."""

    # ── beats ──

    def see_beat(self, rank: RankId, beat: Beat) -> None:
        if beat.times is not None and beat.times.count:
            times = beat.times
            self._steps[rank].append(Steps(beat.step - times.count, beat.step, times.p99, times.longest))

    def take_measured(self, now: float, *, ended: bool = False) -> Iterator[Standstill]:
        """Resizes that have been measured, or that nobody will measure any more."""
        for id, resize in list(self._resizes.items()):
            if resize.settled is None:
                continue
            is_late = now - resize.settled > PATIENCE_SECONDS
            if ended or is_late or self._is_measured(resize.proposed):
                del self._resizes[id]
                yield self._describe(resize)

    def _is_measured(self, proposed: ChangeProposed) -> bool:
        step = proposed.change.step
        return all(sum(steps.last > step for steps in self._steps.get(rank, ())) > 1 for rank, _ in proposed.lives)

    def _describe(self, resize: _Resize) -> Standstill:
        proposed = resize.proposed
        costs = [cost for rank, _ in proposed.lives if (cost := self._cost(rank, proposed.change.step)) is not None]
        return Standstill(
            resize.settled or 0.0,
            proposed.target,
            "resize",
            max(costs, default=None),
            step=proposed.change.step,
            before=_number(proposed.before.get(LOADERS)),
            after=_number(proposed.change.values[LOADERS]),
            detail=proposed.operator,
        )

    def _cost(self, rank: RankId, step: int) -> float | None:
        """Of the beat with this step, that with the next one, and the beat after."""
        beats = list(self._steps.get(rank, ()))
        place = next((place for place, steps in enumerate(beats) if steps.last >= step), None)
        if not place:
            return None  # without a beat before it, or without one that contains it
        after = next((later for later in range(place, len(beats)) if beats[later].last > step), place)
        usual = median(steps.p99 for steps in beats[max(0, place - USUAL) : place])
        return max(0.0, max(steps.longest for steps in beats[place : after + 2]) - usual)

    # ── records ──

    def read(self, record: Record, at: float) -> Iterator[Standstill]:
        match record:
            case ChangeProposed(change=change) if change.action == "pause":
                self._changes[change.id] = record
            case ChangeProposed(change=change) if LOADERS in change.values:
                self._resizes[change.id] = _Resize(record)
            case ChangeDecided(id=id, commit=False):
                self._changes.pop(id, None)
                self._resizes.pop(id, None)
            case ChangeSettled(id=id, applied=applied):
                if id in self._resizes and not applied:
                    del self._resizes[id]
                elif id in self._resizes:
                    self._resizes[id].settled = at
                proposed = self._changes.pop(id, None)
                if proposed is not None and applied:
                    lives = {rank for rank, _ in proposed.lives}
                    pause = _Pause(at, proposed.target, proposed.change.step, proposed.operator, lives)
                    self._pauses.append(pause)
            case OrderGiven(verb="resume"):
                self._resumes[record.id] = {rank for rank, _ in record.lives}
            case OrderEnded(id=id, applied=applied) if id in self._resumes:
                continuing = self._resumes.pop(id)
                if applied:
                    yield from self._continue(at, continuing)
            case IncidentOpened(id=id):
                self._incidents[id] = at
            case runs.ReleaseBegan():
                self._releases[record.job] = record.operator or render(record.reason)
            case runs.AttemptStopping():
                yield from self._continue(at, None)
                self._stop(record, at)
            case runs.AttemptLaunched(heals=False, resume_step=resumed) if record.job in self._stops:
                stop = self._stops[record.job]
                stop.redone = max(0, stop.step - (resumed or 0))
            case runs.AttemptStepped(job=job, seconds=seconds) if job in self._stops:
                yield self._ended(self._stops.pop(job), at - seconds)
            case runs.RunEnded(job=job):
                yield from self._continue(at, None)
                if job in self._stops:
                    yield self._ended(self._stops.pop(job), at)
            case JobEnded():
                yield from self._continue(at, None)

    def _continue(self, at: float, ranks: set[RankId] | None) -> Iterator[Standstill]:
        """These ranks, or all, are not paused any more."""
        for pause in list(self._pauses):
            pause.lives = set() if ranks is None else pause.lives - ranks
            if not pause.lives:
                self._pauses.remove(pause)
                seconds = max(0.0, at - pause.began)
                yield Standstill(pause.began, pause.target, "pause", seconds, step=pause.step, detail=pause.detail)

    def _stop(self, record: runs.AttemptStopping, at: float) -> None:
        action, run = record.next_action, record.job
        if action not in {"restart", "release"} or run in self._stops:
            return
        reason = render(record.reason)
        detail = self._releases.pop(run, reason) if action == "release" else reason
        began = min(at, self._incidents.get(record.incident, at))
        self._stops[run] = _Stop(began, run, action, record.step, detail)

    def _ended(self, stop: _Stop, at: float) -> Standstill:
        seconds = max(0.0, at - stop.began)
        return Standstill(
            stop.began, stop.run, stop.cause, seconds, step=stop.step, redone=stop.redone, detail=stop.detail
        )


def _number(value: object) -> int | None:
    return int(value) if isinstance(value, int | float) else None
