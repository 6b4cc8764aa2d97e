"""A loss that has stopped improving is reported once; one that still falls, rises or has not run for long is not."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator

import pytest

from tests.core.detect.beats import SETTINGS, beat, findings
from torchloom.core.detect.detector import Finding
from torchloom.core.detect.plateau import LEAST
from torchloom.core.detect.rank_detectors import RankDetectors
from torchloom.protocol.rank import Beat
from torchloom.views.wording.phrases import render

Curve = Callable[[int], float]
SEEDS = range(3)
LONG = 8 * LEAST


def beats(curve: Curve, noise: float, count: int, seed: int) -> Iterator[Beat]:
    chance = random.Random(seed)
    return (beat(n, loss=curve(n) * chance.lognormvariate(0.0, noise)) for n in range(count))


def plateaus(curve: Curve, noise: float, count: int, seed: int = 0) -> list[tuple[int, Finding]]:
    found = findings(RankDetectors(SETTINGS), beats(curve, noise, count, seed))
    return [(n, finding) for n, finding in found if finding.kind == "plateau"]


IMPROVING: dict[str, tuple[Curve, float]] = {
    "falls": (lambda n: 2.0 * 0.9999**n, 0.02),
    "falls in much noise": (lambda n: 2.0 * 0.9999**n, 0.2),
    "falls slowly": (lambda n: 2.0 * 0.99997**n, 0.01),
    "falls slowly in much noise": (lambda n: 2.0 * 0.99998**n, 0.2),
    "falls very slowly in little noise": (lambda n: 2.0 * (1.0 - 3e-6 * n), 0.001),
    "falls below 0": (lambda n: 1.0 - 3e-4 * n, 0.01),
    "converges": (lambda n: 1.0 + 3.0 * (n + 10) ** -0.3, 0.02),
    "converges slowly": (lambda n: 3.0 * (n + 10) ** -0.05, 0.05),
    "converges without noise": (lambda n: 1.0 + 2.0 * math.exp(-n / 2000), 0.0),
    "falls after a warm-up": (lambda n: 6.9 * 0.9999 ** max(0, n - LEAST // 2), 0.02),
    "rises very slowly in little noise": (lambda n: 2.0 * (1.0 + 3e-6 * n), 0.001),
    "rises": (lambda n: 2.0 * 1.00005**n, 0.02),
    "rises after a fall": (lambda n: 2.0 * 0.999 ** min(n, 1000) * 1.0001 ** max(0, n - 1000), 0.02),
}


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", IMPROVING)
def test_a_loss_that_still_moves_is_on_no_plateau(name: str, seed: int) -> None:
    curve, noise = IMPROVING[name]
    assert plateaus(curve, noise, LONG, seed) == []


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("noise", "within"), [(0.0, 1.2), (0.01, 2), (0.03, 2), (0.06, 8)])
def test_a_flat_loss_is_reported_once_and_the_sooner_the_less_noisy(noise: float, within: float, seed: int) -> None:
    [(number, finding)] = plateaus(lambda _: 2.0, noise, LONG, seed)
    assert LEAST <= number <= within * LEAST
    assert not finding.over
    assert finding.step == 10 * number


@pytest.mark.parametrize("seed", SEEDS)
def test_a_decay_is_reported_when_it_is_lost_in_the_noise(seed: int) -> None:
    def decay(n: int) -> float:
        return 1.0 + 2.0 * math.exp(-n / 600)

    [(number, _)] = plateaus(decay, 0.02, LONG, seed)
    assert decay(number // 2) < 1.02


@pytest.mark.parametrize("seed", SEEDS)
def test_a_plateau_is_over_when_the_loss_improves_clearly_and_may_come_again(seed: int) -> None:
    later = 2 * LEAST

    (began, first), (ended, over), (again, second) = plateaus(lambda n: 2.0 if n < later else 1.7, 0.02, LONG, seed)
    assert began < later <= ended <= later + LEAST / 4
    assert again >= 2 * later - LEAST / 4
    assert (first.over, over.over, second.over) == (False, True, False)


def test_short_runs_and_runs_without_a_loss_are_not_judged() -> None:
    assert plateaus(lambda _: 2.0, 0.001, LEAST - 1) == []
    detectors = RankDetectors(SETTINGS)
    assert findings(detectors, (beat(n) for n in range(2 * LEAST))) == []


def test_single_spikes_and_losses_that_are_missing_change_nothing() -> None:
    chance = random.Random(1)

    def reported() -> Iterator[Beat]:
        for n in range(3 * LEAST):
            loss = 2.0 * chance.lognormvariate(0.0, 0.01) * (5.0 if n % 97 == 0 else 1.0)
            yield beat(n, loss=None if n % 5 == 0 else loss)

    found = findings(RankDetectors(SETTINGS), reported())
    assert [finding.over for _, finding in found if finding.kind == "plateau"] == [False]


def test_beats_that_are_all_examined_are_judged_as_well() -> None:
    detectors, found = RankDetectors(SETTINGS), list[Finding]()
    for n, said in enumerate(beats(lambda _: 2.0, 0.01, 2 * LEAST, 0)):
        detectors.excuse()  # the next beat is examined
        found += detectors.hear(said, float(n))
    assert [finding.kind for finding in found] == ["plateau"]


@pytest.mark.wording
def test_what_is_reported() -> None:
    (_, begun), (_, over) = plateaus(lambda n: 2.0 if n < 2 * LEAST else 1.5, 0.0, 3 * LEAST)
    assert render(begun.what) == "loss has stopped improving: about 2 in the latest 1,093 beats"
    assert render(begun.evidence[0]) == "2 in the older half of them, 2 in the newer, give or take 0"
    assert render(over.what) == "loss improves again: 1.5"
