"""A rank that fares well but noisily: ten minutes in which nothing may be found that would end it."""

from __future__ import annotations

import random

import pytest

from tests.core.detect.beats import SETTINGS, beat, findings, times
from torchloom.core.detect.case import Case
from torchloom.core.detect.hang import Stand
from torchloom.core.detect.senses import Senses
from torchloom.core.detect.straggler import Race
from torchloom.core.detect.words import ranks
from torchloom.messages import Beat

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
        return beat(0, step=self.step, times=of_steps, still=now - self.ended, loss=2.0 * self._noise(0.1),
                    metrics={"grad_norm": self._noise(0.5)}, rss_mb=self.memory)  # fmt: skip

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


@pytest.mark.parametrize("seed", range(5))
def test_ten_minutes_of_noise_end_no_rank(seed: int) -> None:
    trainers = [Trainer(rank, seed) for rank in range(RANKS)]
    senses = [Senses(SETTINGS, limit_mb=64_000.0) for _ in trainers]
    case, race = Case(), Race[int]()
    told: list[tuple[str, int]] = []
    hangs = set()
    for now in range(1, SECONDS + 1):
        stands = []
        for trainer, sense in zip(trainers, senses, strict=True):
            if now % 97 == 0:
                trainer.loaded_until = now + 5.0  # the whole machine is busy with something else
            said = trainer.beat(float(now))
            told += [(one.kind, trainer.rank) for one in sense.hear(said, float(now)) if not one.over]
            pace = sense.pace
            stands.append(
                Stand(
                    trainer.rank,
                    said.step,
                    said.still,
                    limit=pace.limit(SETTINGS),
                    started=pace.started,
                    pause=pace.pause,
                )
            )
        told += [(one.kind, rank) for rank, one in race.look(dict(enumerate(s.own for s in senses)), SETTINGS)]
        found = case.look(stands, SETTINGS, float(now))
        if found is not None:
            assert found.seconds < found.act_after
            hangs.add(found.culprits)
    assert told == []
    assert len(hangs) <= 3 * RANKS  # long pauses that nobody announced are told while they are new


def test_nothing_is_found_in_beats_that_say_nothing() -> None:
    assert findings(Senses(SETTINGS), [beat(n, times=None) for n in range(100)]) == []


def test_what_a_paused_or_evaluating_rank_says_is_no_measure() -> None:
    usual = [beat(n, loss=2.0, times=times(data=0.0)) for n in range(60)]
    for told in ({"paused": True}, {"phase": "eval"}):
        other = [beat(n, loss=900.0, times=times(5.0, data=5.0), rss_mb=9e9, **told) for n in range(60)]
        assert findings(Senses(SETTINGS, limit_mb=64_000.0), usual + other + usual) == []


def test_several_things_can_begin_with_one_beat() -> None:
    usual = [beat(n, loss=2.0, metrics={"gnorm": 1.0}) for n in range(60)]
    told = findings(Senses(SETTINGS), [*usual, beat(60, not_finite=("accuracy",), loss=1e9, metrics={"gnorm": 1e9})])
    assert [one.kind for _, one in told] == ["not_finite", "loss_spike", "gradient"]


def test_ranks_are_named_in_few_words() -> None:
    assert ranks([3]) == "rank 3"
    assert ranks([2, 0, 1, 9, 9]) == "ranks 0-2, 9"
    assert ranks([]) == "no rank"
    assert ranks(range(0, 2000, 2)).endswith("and others, 1000 in all")
