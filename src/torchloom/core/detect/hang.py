"""Who makes no progress, and who only waits for them.

In a synchronous job one rank that stands still makes all stand still. So a rank whose step takes too long is a *late*
one, not yet a culprit, and first someone is looked for who explains it:

    a rank that may still take its time    evaluates, compiles, or is in a step that is not too long yet: no verdict
    a rank that is dead, frozen or held    that one; the late ones wait for it
    the late ones with the smallest step   the others wait in the step that these did not finish
    … with the fewest collectives begun    the others wait in a collective that these did not reach
    nobody                                 all stand at the same place: a network, a store, a deadlock of all

A rank explains another only if it could be what the other waits for: it is no further than that one (one step, for news
that are under way), and not far behind, as ranks that do not synchronise may be. Where ranks do not synchronise the
others pass the one that hangs, explain nothing, and it is the hang of that rank alone.

`diagnose` judges a single look; HangTracker knows what only several looks tell.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from torchloom.core.detect.slow_steps import DATA
from torchloom.protocol.phrase import Phrase, Prose, phrase
from torchloom.settings import Settings

AHEAD = 1
BEHIND = 64
"""Steps by which the ranks of a synchronous job can differ: those between two synchronisations."""
PAUSES = 3.0
"""Nothing is done before this many times the longest pause that a rank has come back from."""
NEWS = 2.5
"""Beats after which everyone has been heard again."""
MOST_SPANS = 12
"""Spans of ranks that are listed; of more, how many ranks there are in all."""
HangKind = Literal["frozen", "held", "hang"]


class RankProgress(NamedTuple):
    """Where one rank stands. Ranks that are paused are left out."""

    rank: int
    step: int
    idle_seconds: float
    """Seconds without a step."""
    frozen: float = 0.0
    held: float = 0.0
    computes: bool = False
    phase: str = ""
    collectives: int | None = None
    dead: bool = False
    limit: float = 0.0
    """How long it may stay at one step: StepTimeBaseline.limit; infinite, if nothing is known of its steps."""
    started: bool = True
    """It has made its first steps: StepTimeBaseline.started."""
    pause: float = 0.0
    """The longest pause from which it has resumed: StepTimeBaseline.pause."""
    usual: float = 0.0
    """How long its slow steps take: StepTimeBaseline.p99."""

    @property
    def aside(self) -> bool:
        """It says that it does something other than training. Waiting for data is part of training: a loader that never
        returns another batch is a hang."""
        return self.phase not in ("", DATA)

    @property
    def trains(self) -> bool:
        """It has made its first steps, and does nothing else."""
        return self.started and not self.aside


class HangDiagnosis(NamedTuple):
    kind: HangKind
    culprits: tuple[int, ...]
    """Empty: nobody can be singled out."""
    why: tuple[Prose, ...]
    certain: bool
    """Seen, or left over when all else is explained; otherwise it may be a very long step."""
    act_after: float
    """Before `seconds` has reached this nothing should be done but to tell."""
    seconds: float
    """How long it has lasted."""
    waiting: tuple[int, ...] = ()
    """Those that make no progress because of the culprits."""
    lone: bool = False
    """Others continue: either they do not need these ranks, or news of these are under way. See HangTracker."""


def diagnose(ranks: Sequence[RankProgress], settings: Settings) -> HangDiagnosis | None:
    """What is wrong, if anything is."""
    alive = [progress for progress in ranks if not progress.dead]
    frozen = [progress for progress in alive if progress.frozen >= settings.frozen_seconds]
    late = [progress for progress in alive if is_late(progress, settings)]
    if frozen:
        return _with_waiting(_frozen(frozen, all_of=len(frozen) == len(alive), settings=settings), late)
    held = [progress for progress in alive if progress.held >= _held_from(progress, settings)]
    if held:
        return _with_waiting(_held(held, all_of=len(held) == len(alive) > 1, settings=settings), late)
    dead = [progress for progress in ranks if progress.dead]
    unexplained = late if dead else _unexplained(alive, late)
    return _with_waiting(_hang(ranks, dead, unexplained, settings), unexplained) if unexplained else None


def is_late(progress: RankProgress, settings: Settings) -> bool:
    """Whether a rank has been where it is for longer than it may. Without such a rank nobody hangs."""
    return progress.idle_seconds >= allowance(progress, settings)


def allowance(progress: RankProgress, settings: Settings) -> float:
    """How long this rank may stay where it is."""
    if not progress.started:
        return max(settings.first_step_seconds, progress.limit)
    return max(settings.phase_seconds, progress.limit) if progress.aside else progress.limit


def _held_from(progress: RankProgress, settings: Settings) -> float:
    """Steps may hold the interpreter, and loading may do so for long."""
    usual = 2 * progress.usual if progress.trains else settings.busy_act_seconds / 2
    return max(settings.held_seconds, usual)


def _unexplained(alive: list[RankProgress], late: list[RankProgress]) -> list[RankProgress]:
    names = {progress.rank for progress in late}
    patient = [progress for progress in alive if progress.rank not in names]
    return [progress for progress in late if not any(_explains(other, progress) for other in patient)]


def _explains(other: RankProgress, late: RankProgress) -> bool:
    """Whether a rank that may take its time could be what a late one waits for."""
    if not other.started:
        return math.isfinite(other.limit)  # nothing is expected of a rank whose steps are unknown
    ahead = other.step - late.step
    return ahead <= AHEAD and (other.aside or ahead >= -BEHIND)


def _frozen(frozen: list[RankProgress], all_of: bool, settings: Settings) -> HangDiagnosis:
    lasted = min(progress.frozen for progress in frozen)
    why = [phrase("process_stopped", ranks=spans(_numbers(frozen)), lasted=lasted)]
    if all_of:
        why.append(phrase("all_ranks_stopped"))
    act_after = settings.hang_act_seconds if all_of else settings.frozen_act_seconds
    return HangDiagnosis("frozen", _numbers(frozen), tuple(why), True, act_after, lasted)


def _held(held: list[RankProgress], all_of: bool, settings: Settings) -> HangDiagnosis:
    lasted = min(progress.held for progress in held)
    why = [phrase("interpreter_kept", ranks=spans(_numbers(held)), lasted=lasted)]
    busy = [progress for progress in held if progress.computes]
    if busy:
        why.append(phrase("computes_meanwhile", ranks=spans(_numbers(busy))))
    act_after = max(_held_act(progress, settings) for progress in held)
    if all_of:
        why.append(phrase("all_ranks_held"))
        act_after = max(act_after, settings.hang_act_seconds)
    return HangDiagnosis("held", _numbers(held), tuple(why), not busy, act_after, lasted)


def _held_act(progress: RankProgress, settings: Settings) -> float:
    if progress.computes or not progress.trains:
        return max(settings.busy_act_seconds, PAUSES * progress.pause)
    return max(settings.held_act_seconds, PAUSES * progress.usual)


def _hang(
    ranks: Sequence[RankProgress], dead: list[RankProgress], late: list[RankProgress], settings: Settings
) -> HangDiagnosis:
    lasted = min(progress.idle_seconds for progress in late)
    lone = not dead and len(late) < len(ranks)
    if dead:
        culprits, why = dead, [phrase("peers_died", ranks=spans(_numbers(dead)))]
    else:
        culprits, why = _behind(late)
        if not culprits and (lone or len(late) == 1):
            culprits = late
    most = max(allowance(progress, settings) for progress in late)
    why.append(phrase("no_step_for", ranks=spans(_numbers(late)), lasted=lasted, most=most))
    if lone:
        why.append(phrase("others_go_on"))
    elif not culprits:
        why.append(phrase("all_at_one_step", step=late[0].step))
    act_after = max(_act_after(progress, settings) for progress in late)
    certain = bool(dead) or 0 < len(culprits) < len(late)
    if not certain:  # it may well be an evaluation that nobody announced
        act_after = max(act_after, settings.phase_seconds)
    return HangDiagnosis("hang", _numbers(culprits), tuple(why), certain, act_after, lasted, lone=lone)


def _behind(late: list[RankProgress]) -> tuple[list[RankProgress], list[Phrase]]:
    """Those that did not come as far as the others, and how that is known."""
    first, last = min(progress.step for progress in late), max(progress.step for progress in late)
    if first < last:
        behind = [progress for progress in late if progress.step == first]
        return behind, [phrase("behind_in_steps", ranks=spans(_numbers(behind)), first=first, last=last)]
    counts = [progress.collectives for progress in late if progress.collectives is not None]
    if len(counts) < 2 or min(counts) == max(counts):
        return [], []
    behind = [progress for progress in late if progress.collectives == min(counts)]
    return behind, [
        phrase("behind_in_collectives", ranks=spans(_numbers(behind)), fewest=min(counts), most=max(counts))
    ]


def _act_after(progress: RankProgress, settings: Settings) -> float:
    patience = max(settings.hang_act_seconds, PAUSES * progress.pause)
    return patience + (0.0 if progress.trains else allowance(progress, settings))


def _with_waiting(diagnosis: HangDiagnosis, late: list[RankProgress]) -> HangDiagnosis:
    """Those that are late and not to blame wait for the culprits."""
    blamed = set(diagnosis.culprits)
    waiting = tuple(number for number in _numbers(late) if number not in blamed)
    if not blamed or not waiting:
        return diagnosis
    return diagnosis._replace(waiting=waiting, why=(*diagnosis.why, phrase("ranks_wait_for_it", ranks=spans(waiting))))


def _numbers(ranks: Sequence[RankProgress]) -> tuple[int, ...]:
    return tuple(sorted(progress.rank for progress in ranks))


def consecutive(numbers: Iterable[int]) -> list[tuple[int, int]]:
    """The first and the last of each that follow one another: (0, 2), (5, 5) of 0, 1, 2 and 5."""
    pairs: list[tuple[int, int]] = []
    for number in sorted(numbers):
        if pairs and number == pairs[-1][1] + 1:
            pairs[-1] = (pairs[-1][0], number)
        else:
            pairs.append((number, number))
    return pairs


def spans(numbers: Iterable[int]) -> tuple[tuple[int, int] | int, ...]:
    """Ranks in little room: after the first dozen spans stands the number of all ranks instead of the others."""
    ranks = set(numbers)
    pairs = consecutive(ranks)
    return (*pairs[:MOST_SPANS], len(ranks)) if len(pairs) > MOST_SPANS else tuple(pairs)


@dataclass
class HangTracker:
    """Hangs of one job over time. Ask it once in a while with where its ranks stand; paused ones are left out.

    Ranks are heard one after the other, a beat apart. When a long pause ends, the first rank to be heard has moved
    while the others still seem to stand where they were. So a hang of some ranks while others continue must be seen for
    a while. A rank that comes back out of a phase, a pause or a stop has made no step meanwhile and is not to blame for
    that.
    """

    _back: dict[int, float] = field(default_factory=dict)
    """Rank → since when it is here and expected to make steps."""
    _lone: tuple[int, ...] = ()
    _since: float = 0.0
    """When the lone ranks were first seen to hang."""

    def look(
        self, ranks: Sequence[RankProgress], settings: Settings, now: float, beat: float = 1.0
    ) -> HangDiagnosis | None:
        return self.judge([self.fair(progress, now) for progress in ranks], settings, now, beat)

    def judge(
        self, ranks: Sequence[RankProgress], settings: Settings, now: float, beat: float = 1.0, suspect: bool = True
    ) -> HangDiagnosis | None:
        """The same of stands that are `fair` already. Without a `suspect` there is no verdict.

        A caller that goes through many ranks in slices finds out about both on its way.
        """
        diagnosis = diagnose(ranks, settings) if suspect else None
        if len(self._back) > len(ranks):
            here = {progress.rank for progress in ranks}
            self._back = {rank: at for rank, at in self._back.items() if rank in here}
        if diagnosis is None or not diagnosis.lone:
            self._lone = ()
            return diagnosis
        if diagnosis.culprits != self._lone:
            self._lone, self._since = diagnosis.culprits, now
        return diagnosis if now - self._since >= NEWS * beat else None

    def fair(self, progress: RankProgress, now: float) -> RankProgress:
        """Without the time in which it was not expected to make a step."""
        back = self._back.get(progress.rank)
        if back is None or progress.aside or progress.frozen:
            self._back[progress.rank] = now
            return progress if back is not None else progress._replace(idle_seconds=0.0)
        return progress._replace(idle_seconds=now - back) if now - back < progress.idle_seconds else progress
