"""Numbers that went bad."""

from __future__ import annotations

import random

import pytest

from tests.core.detect.beats import SETTINGS, beat, findings, noise
from torchloom.core.detect.bad_numbers import is_gradient
from torchloom.core.detect.rank_detectors import RankDetectors
from torchloom.protocol.phrase import Phrase, phrase
from torchloom.protocol.rank import Beat


def of_losses(values: list[float], start: int = 0) -> list[Beat]:
    return [beat(start + n, loss=value) for n, value in enumerate(values)]


def noisy(count: int, seed: int = 1, level: float = 2.0, share: float = 0.05) -> list[float]:
    return [level * value for value, _ in zip(noise(seed, share), range(count), strict=False)]


def test_a_loss_that_is_nan_is_told_at_that_beat_once_and_ends_when_it_is_finite_again() -> None:
    detectors = RankDetectors(SETTINGS)
    beats = [beat(n, loss=1.0) for n in range(5)]
    beats += [beat(n, not_finite=("loss",)) for n in range(5, 9)]
    beats += [beat(n, loss=1.0) for n in range(9, 20)]
    (begun, first), (ended, last) = findings(detectors, beats)
    assert (begun, first.kind, first.over, first.step) == (5, "not_finite", False, 50)
    assert first.what == phrase("values_not_finite_at", names=["loss"], step=50)
    assert last.over
    assert ended == 13


def test_where_a_rank_knows_that_its_loss_went_bad_is_where_it_did() -> None:
    beats = [beat(1, loss=1.0), beat(2, not_finite=("loss",), bad_steps=(13, 14))]
    ((_, found),) = findings(RankDetectors(SETTINGS), beats)
    assert (found.since, found.step) == (13, 14)
    assert found.what == phrase("values_not_finite_since", names=["loss"], step=14)


def test_a_loss_that_follows_a_metric_is_told_anew() -> None:
    detectors = RankDetectors(SETTINGS)
    told = findings(detectors, [beat(1, not_finite=("accuracy",))] * 3 + [beat(2, not_finite=("accuracy", "loss"))] * 3)
    assert [n for n, _ in told] == [0, 3]


def test_nan_is_heard_even_where_no_step_was_finished() -> None:
    assert findings(RankDetectors(SETTINGS), [beat(1, times=None, not_finite=("loss",))])


def test_noise_is_no_spike() -> None:
    for seed in range(20):
        for share in (0.01, 0.2, 0.8):
            detectors = RankDetectors(SETTINGS)
            assert findings(detectors, of_losses(noisy(600, seed, share=share))) == []


def test_a_loss_that_falls_is_no_spike() -> None:
    assert findings(RankDetectors(SETTINGS), of_losses([10 * 0.97**n for n in range(400)])) == []


def test_a_spike_is_told_after_a_few_beats_and_over_when_it_is_gone() -> None:
    detectors = RankDetectors(SETTINGS)
    values = noisy(60) + [6.0] * 10 + noisy(20, seed=2)
    (begun, first), (ended, last) = findings(detectors, of_losses(values))
    assert first.kind == "loss_spike"
    assert begun == 62
    assert last.over
    assert ended == 72


def test_a_huge_jump_needs_no_second_beat() -> None:
    ((begun, first),) = findings(RankDetectors(SETTINGS), of_losses([*noisy(60), 2000.0]))
    assert begun == 60
    assert first.what == phrase("value_jumped", name="loss", usual=pytest.approx(2.0, rel=0.01), value=2000.0, step=600)


def test_one_stray_value_is_no_spike() -> None:
    values = noisy(200)
    values[100] = values[150] = 4.0
    assert findings(RankDetectors(SETTINGS), of_losses(values)) == []


def test_a_new_level_that_stays_is_accepted() -> None:
    told = findings(RankDetectors(SETTINGS), of_losses(noisy(60) + noisy(400, level=20.0)))
    assert [one.over for _, one in told] == [False, True]
    what = told[1][1].what
    assert isinstance(what, Phrase)
    assert (what.code, what.args["value"]) == ("value_stays", pytest.approx(20.0, rel=0.1))


def test_a_loss_that_is_told_again_between_steps_is_one_value() -> None:
    beats = of_losses(noisy(60)) + [beat(60, loss=5.0)] + [beat(60, loss=5.0, times=None)] * 20
    assert findings(RankDetectors(SETTINGS), beats) == []


@pytest.mark.parametrize("name", ["grad_norm", "train/grad_norm", "gnorm", "Gradient-Norm", "optim.total_norm"])
def test_an_exploding_gradient_is_told_by_whatever_name_it_has(name: str) -> None:
    assert is_gradient(name)
    chance = random.Random(3)
    beats = [beat(n, metrics={"lr": 0.1, name: chance.lognormvariate(0.0, 0.4)}) for n in range(80)]
    beats += [beat(n, metrics={"lr": 0.1, name: 1000.0 * 2**n}) for n in range(5)]
    ((begun, first),) = findings(RankDetectors(SETTINGS), beats)
    assert (begun, first.kind) == (80, "gradient")
    assert isinstance(first.what, Phrase)
    assert first.what.args["name"] == name


def test_other_metrics_may_jump_as_they_like() -> None:
    beats = [beat(n, metrics={"norm": 10.0**n, "lr": 0.1}) for n in range(40)]
    assert findings(RankDetectors(SETTINGS), beats) == []


def test_a_gradient_that_overflows_now_and_then_is_normal_with_loss_scaling() -> None:
    good, bad = beat(1, metrics={"grad_norm": 1.0}), beat(1, not_finite=("grad_norm",))
    assert findings(RankDetectors(SETTINGS), ([good] * 20 + [bad]) * 10) == []
    told = findings(RankDetectors(SETTINGS), [good] * 20 + [bad] * 10 + [good] * 10)
    assert [(n, one.kind, one.over) for n, one in told] == [(22, "gradient", False), (32, "gradient", True)]
