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
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

from torchloom.core.detect.rank_spans import spans
from torchloom.core.detect.starvation import DATA
from torchloom.protocol.phrase import Phrase, Prose, phrase
from torchloom.settings import Settings

AHEAD = 1
BEHIND = 64
"""Steps by which the ranks of a synchronous job can differ: those between two synchronisations."""
PAUSES = 3.0
"""Nothing is done before this many times the longest pause that a rank has come back from."""
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


class HangDiagnosis(NamedTuple):
    kind: HangKind
    culprits: tuple[int, ...]
    """Empty: nobody can be singled out."""
    waiting: tuple[int, ...]
    """Those that make no progress because of them."""
    why: tuple[Prose, ...]
    certain: bool
    """Seen, or left over when all else is explained; otherwise it may be a very long step."""
    act_after: float
    """Before `seconds` has reached this nothing should be done but to tell."""
    seconds: float
    """How long it has lasted."""
    lone: bool = False
    """Others continue: either they do not need these ranks, or news of these are under way. See HangTracker."""


def diagnose(ranks: Sequence[RankProgress], settings: Settings) -> HangDiagnosis | None:
    """What is wrong, if anything is."""
    alive = [progress for progress in ranks if not progress.dead]
    frozen = [progress for progress in alive if progress.frozen >= settings.frozen_seconds]
    late = [progress for progress in alive if progress.idle_seconds >= allowance(progress, settings)]
    if frozen:
        return _frozen(frozen, late, all_of=len(frozen) == len(alive), settings=settings)
    held = [progress for progress in alive if progress.held >= _held_from(progress, settings)]
    if held:
        return _held(held, late, all_of=len(held) == len(alive) > 1, settings=settings)
    dead = [progress for progress in ranks if progress.dead]
    unexplained = late if dead else _unexplained(alive, late)
    return _hang(ranks, dead, unexplained, settings) if unexplained else None


def is_suspect(progress: RankProgress, settings: Settings) -> bool:
    """Whether there can be a verdict at all because of this rank."""
    return (
        progress.idle_seconds >= allowance(progress, settings)
        or progress.frozen >= settings.frozen_seconds
        or progress.held >= _held_from(progress, settings)
    )


def allowance(progress: RankProgress, settings: Settings) -> float:
    """How long this rank may stay where it is."""
    if not progress.started:
        return max(settings.first_step_seconds, progress.limit)
    return max(settings.phase_seconds, progress.limit) if progress.aside else progress.limit


def _held_from(progress: RankProgress, settings: Settings) -> float:
    """Steps may hold the interpreter, and loading may do so for long."""
    usual = 2 * progress.usual if progress.started and not progress.aside else settings.busy_act_seconds / 2
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


def _frozen(frozen: list[RankProgress], late: list[RankProgress], all_of: bool, settings: Settings) -> HangDiagnosis:
    culprits, waiting, lasted = _numbers(frozen), _others(late, frozen), min(progress.frozen for progress in frozen)
    why = [phrase("process_stopped", ranks=spans(culprits), lasted=lasted)]
    if all_of:
        why.append(phrase("all_ranks_stopped"))
    act_after = settings.hang_act_seconds if all_of else settings.frozen_act_seconds
    return HangDiagnosis("frozen", culprits, waiting, (*why, *_waits(waiting)), True, act_after, lasted)


def _held(held: list[RankProgress], late: list[RankProgress], all_of: bool, settings: Settings) -> HangDiagnosis:
    culprits, waiting, lasted = _numbers(held), _others(late, held), min(progress.held for progress in held)
    why = [phrase("interpreter_kept", ranks=spans(culprits), lasted=lasted)]
    busy = [progress for progress in held if progress.computes]
    if busy:
        why.append(phrase("computes_meanwhile", ranks=spans(_numbers(busy))))
    act_after = max(_held_act(progress, settings) for progress in held)
    if all_of:
        why.append(phrase("all_ranks_held"))
        act_after = max(act_after, settings.hang_act_seconds)
    return HangDiagnosis("held", culprits, waiting, (*why, *_waits(waiting)), not busy, act_after, lasted)


def _held_act(progress: RankProgress, settings: Settings) -> float:
    if progress.computes or not progress.started or progress.aside:
        return max(settings.busy_act_seconds, PAUSES * progress.pause)
    return max(settings.held_act_seconds, PAUSES * progress.usual)


def _hang(
    ranks: Sequence[RankProgress], dead: list[RankProgress], late: list[RankProgress], settings: Settings
) -> HangDiagnosis:
    alive = len(ranks) - len(dead)
    lasted = min(progress.idle_seconds for progress in late)
    lone = not dead and len(late) < alive
    if dead:
        culprits, why = dead, [phrase("peers_died", ranks=spans(_numbers(dead)))]
    else:
        culprits, why = _behind(late)
        if not culprits and (lone or len(late) == 1):
            culprits = late
    act_after, waiting = max(_act_after(progress, settings) for progress in late), _others(late, culprits)
    most = max(allowance(progress, settings) for progress in late)
    why.append(phrase("no_step_for", ranks=spans(_numbers(late)), lasted=lasted, most=most))
    if lone:
        why.append(phrase("others_go_on"))
    elif not culprits:
        why.append(phrase("all_at_one_step", step=late[0].step))
    certain = bool(culprits) and (bool(waiting) or bool(dead))
    if not certain:  # it may well be an evaluation that nobody announced
        act_after = max(act_after, settings.phase_seconds)
    return HangDiagnosis(
        "hang", _numbers(culprits), waiting, (*why, *_waits(waiting)), certain, act_after, lasted, lone
    )


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
    began = phrase("behind_in_collectives", ranks=spans(_numbers(behind)), fewest=min(counts), most=max(counts))
    return behind, [began]


def _act_after(progress: RankProgress, settings: Settings) -> float:
    patience = max(settings.hang_act_seconds, PAUSES * progress.pause)
    return patience + (allowance(progress, settings) if progress.aside or not progress.started else 0.0)


def _numbers(ranks: Sequence[RankProgress]) -> tuple[int, ...]:
    return tuple(sorted(progress.rank for progress in ranks))


def _others(late: list[RankProgress], culprits: list[RankProgress]) -> tuple[int, ...]:
    blamed = {progress.rank for progress in culprits}
    return tuple(sorted(progress.rank for progress in late if progress.rank not in blamed)) if culprits else ()


def _waits(waiting: tuple[int, ...]) -> tuple[Phrase, ...]:
    waits = phrase("rank_waits_for_it" if len(waiting) == 1 else "ranks_wait_for_it", ranks=spans(waiting))
    return (waits,) if waiting else ()
