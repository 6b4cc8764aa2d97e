"""A rank that fares well but noisily: ten minutes in which nothing may be found that would end it."""

from __future__ import annotations

import random

import pytest

from tests.core.detect.beats import SETTINGS, beat, findings, times
from torchloom.core.detect.hang import HangTracker, RankProgress, spans
from torchloom.core.detect.rank_detectors import RankDetectors
from torchloom.core.detect.straggler import StragglerDetector
from torchloom.protocol.rank import Beat

SECONDS = 600
RANKS = 4
PAUSES = {"gc": (0.02, 0.3, 1.8), "load": (0.01, 2.0, 20.0), "evaluation": (0.004, 5.0, 90.0)}
"""What happens to a rank now and then: (chance in a second, shortest, longest)."""


class Trainer:
    """Plays the steps of one rank, in a time of its own: heavy-tailed, with pauses, bursts of load and evaluations."""

    def __init__(self, rank: int, seed: int) -> None:
        self.chance = random.Random(seed * 100 + rank)
        self.rank = rank
        self.step = 0
        self.ended = 0.0
        self.until = self.chance.uniform(5.0, 60.0)  # the first step: it loads and compiles
        self.loaded_until = 0.0
        self.memory = 2000.0

    def beat(self, now: float) -> Beat:
        durations = []
        while self.until <= now:
            durations.append(self.until - self.ended)
            self.ended = self.until
            self.step += 1
            self.until += self._next(now)
        self.memory += self.chance.gauss(0.0, 5.0)
        steps = sorted(durations)
        of_steps = None
        if steps and self.step > len(steps):
            middle, slow = steps[len(steps) // 2], steps[int(0.99 * (len(steps) - 1))]
            of_steps = times(middle, slow, steps[-1], own=0.9 * middle, data=0.05 * middle, count=len(steps))
        return beat(0, step=self.step, times=of_steps, idle_seconds=now - self.ended, loss=2.0 * self._noise(0.1),
                    metrics={"grad_norm": self._noise(0.5)}, rss_mb=self.memory,
                    free_mb=64_000.0 - self.memory)  # fmt: skip

    def _noise(self, share: float) -> float:
        return self.chance.lognormvariate(0.0, share)

    def _next(self, now: float) -> float:
        step = (
            0.1 * self._noise(0.3) * min(5.0, self.chance.paretovariate(4)) * (2.0 if now < self.loaded_until else 1.0)
        )
        if self.chance.random() < 0.01 * step:
            self.loaded_until = now + self.chance.uniform(1.0, 3.0)
        pauses = [p for often, *p in PAUSES.values() if self.chance.random() < often * step]
        return step + sum(self.chance.uniform(shortest, longest) for shortest, longest in pauses)


UNLUCKY = (5010, 5013)
"""Where bursts and pauses add up: half of the latest beats of a rank are slow; a rank is slower than its peers."""


@pytest.mark.parametrize("seed", [*range(5), *UNLUCKY])
def test_ten_minutes_of_noise_end_no_rank(seed: int) -> None:
    trainers = [Trainer(rank, seed) for rank in range(RANKS)]
    detectors = [RankDetectors(SETTINGS) for _ in trainers]
    case, race = HangTracker(), StragglerDetector[int]()
    told: list[tuple[str, int]] = []
    hangs = set()
    for now in range(1, SECONDS + 1):
        stands = []
        for trainer, sense in zip(trainers, detectors, strict=True):
            if now % 97 == 0:
                trainer.loaded_until = now + 5.0  # the whole machine is busy with something else
            said = trainer.beat(float(now))
            told += [(one.kind, trainer.rank) for one in sense.hear(said, float(now)) if not one.over]
            pace = sense.pace
            stands.append(
                RankProgress(
                    trainer.rank,
                    said.step,
                    said.idle_seconds,
                    limit=pace.limit(SETTINGS),
                    started=pace.started,
                    pause=pace.pause,
                )
            )
        told += [(one.kind, rank) for rank, one in race.look(dict(enumerate(s.own for s in detectors)), SETTINGS)]
        found = case.look(stands, SETTINGS, float(now))
        if found is not None:
            assert found.seconds < found.act_after
            hangs.add(found.culprits)
    assert told == []
    assert len(hangs) <= 3 * RANKS  # long pauses that nobody announced are told while they are new


def test_nothing_is_found_in_beats_that_say_nothing() -> None:
    assert findings(RankDetectors(SETTINGS), [beat(n, times=None) for n in range(100)]) == []


def test_what_a_paused_or_evaluating_rank_says_is_no_measure() -> None:
    usual = [beat(n, loss=2.0, times=times(data=0.0), free_mb=64_000.0) for n in range(60)]
    for told in ({"paused": True}, {"phase": "eval"}):
        other = [beat(n, loss=900.0, times=times(5.0, data=5.0), rss_mb=9e9, free_mb=1.0, **told) for n in range(60)]
        assert findings(RankDetectors(SETTINGS), usual + other + usual) == []


def test_several_things_can_begin_with_one_beat() -> None:
    usual = [beat(n, loss=2.0, metrics={"gnorm": 1.0}) for n in range(60)]
    told = findings(
        RankDetectors(SETTINGS), [*usual, beat(60, not_finite=("accuracy",), loss=1e9, metrics={"gnorm": 1e9})]
    )
    assert [one.kind for _, one in told] == ["not_finite", "loss_spike", "gradient"]


def eventful(seed: int) -> list[Beat]:
    """Something of each kind, one after the other, in beats that are ordinary otherwise."""
    chance = random.Random(seed)
    beats = []
    for n in range(500):
        p50 = 0.1 * chance.lognormvariate(0.0, 0.03) * (2.0 if 100 <= n < 130 else 1.0)
        share = 0.8 if 170 <= n < 200 else 0.05
        loss = 2.0 * chance.lognormvariate(0.0, 0.05) * (9.0 if 240 <= n < 244 else 1.0)
        norm = chance.lognormvariate(0.0, 0.2) * (99.0 if 280 <= n < 285 else 1.0)
        rss = 20_000.0 + chance.gauss(0.0, 20.0) + 200.0 * max(0, min(n, 400) - 320)
        beats.append(
            beat(n, times=times(p50, data=share * p50), loss=loss, metrics={"grad_norm": norm}, rss_mb=rss,
                 free_mb=64_000.0 - rss, not_finite=("accuracy",) if n == 450 else ())
        )  # fmt: skip
    return beats


@pytest.mark.parametrize("seed", range(5))
def test_beats_that_are_put_aside_are_learnt_from_as_if_each_were_examined(seed: int) -> None:
    aside, each = RankDetectors(SETTINGS), RankDetectors(SETTINGS)
    together = [(n, one) for n, said in enumerate(eventful(seed)) for one in aside.hear(said, float(n))]
    singly = []
    for n, said in enumerate(eventful(seed)):
        each.excuse()  # the next beat is examined
        singly += [(n, one) for one in each.hear(said, float(n))]
    kinds = ("slowdown", "starved", "loss_spike", "gradient", "memory", "not_finite")
    assert [(one.kind, one.over) for _, one in together] == [(kind, over) for kind in kinds for over in (False, True)]
    assert [(one.kind, one.over) for _, one in singly] == [(one.kind, one.over) for _, one in together]
    assert all(abs(a - b) <= 4 for (a, _), (b, _) in zip(together, singly, strict=True))


def test_a_stop_by_hand_after_ordinary_beats_teaches_nothing() -> None:
    detectors = RankDetectors(SETTINGS)
    findings(detectors, [beat(n) for n in range(100)])
    detectors.excuse()
    detectors.hear(beat(100, times=times(longest=500.0)), 600.0)
    assert detectors.pace.pause < 1.0
    detectors.hear(beat(101, times=times(longest=50.0)), 651.0)
    assert detectors.pace.pause == 50.0


def test_ranks_that_follow_one_another_are_one_span_and_very_many_are_counted() -> None:
    assert spans([3]) == ((3, 3),)
    assert spans([2, 0, 1, 9, 9]) == ((0, 2), (9, 9))
    assert spans([]) == ()
    assert spans(range(0, 2000, 2)) == (*((n, n) for n in range(0, 24, 2)), 1000)
