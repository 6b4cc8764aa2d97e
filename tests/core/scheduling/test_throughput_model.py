"""The throughput model predicts numbers of loaders that were never tried, and knows how sure it is."""

from __future__ import annotations

import random
import statistics

import pytest

from tests.core.scheduling.jobs import measured
from torchloom.core.scheduling.throughput_model import PRIOR, RECENT, Curve, Measurement, ThroughputModel, prior_curve
from torchloom.protocol.data_loading import Loading

HELD_OUT = range(17)
SEEDS = range(60)


def random_curve(chance: random.Random) -> Curve:
    ceiling = 10 ** chance.uniform(1, 4)
    return Curve(ceiling / 10 ** chance.uniform(0, 1.2), ceiling, chance.uniform(0, 0.15))


def with_outlier(one: Measurement, chance: random.Random) -> Measurement:
    wait, use, load = (
        one.wait * chance.choice((0, 10)),
        one.use * chance.choice((1, 5)),
        one.load * chance.choice((0.2, 5)),
    )
    return Measurement(one.loaders, one.batches, one.samples, wait, use, load)


def learnt(truth: Curve, tried: tuple[int, ...], chance: random.Random, outliers: float = 0.0) -> tuple[Curve, float]:
    model, now = ThroughputModel(), 0.0
    for loaders in tried:
        for _ in range(11):
            now += 1
            one = measured(truth, loaders, chance)
            model.add(with_outlier(one, chance) if chance.random() < outliers else one, now)
    return model.curve(now), now


@pytest.mark.parametrize("outliers", [0.0, 0.05])
@pytest.mark.parametrize("tried", [(4,), (1, 4), (2, 6), (2, 4, 12)])
def test_held_out_numbers_of_loaders_are_predicted(tried: tuple[int, ...], outliers: float) -> None:
    errors = []
    for seed in SEEDS:
        chance = random.Random(seed)
        truth = random_curve(chance)
        curve, _ = learnt(truth, tried, chance, outliers)
        errors += [abs(curve.throughput(w) / truth.throughput(w) - 1) for w in HELD_OUT if w not in tried]
    assert statistics.fmean(errors) <= (0.1 if len(tried) == 1 else 0.03)


def test_most_predictions_are_within_two_standard_errors() -> None:
    within = []
    for seed in SEEDS:
        chance = random.Random(seed)
        truth = random_curve(chance)
        curve, _ = learnt(truth, (2, 6), chance)
        within += [abs(curve.throughput(w) - truth.throughput(w)) < 2 * curve.throughput_error(w) for w in HELD_OUT]
    assert statistics.fmean(within) >= 0.85
    assert curve.throughput_error(6) < 0.1 * truth.throughput(6)


def test_one_bad_window_at_a_new_number_of_loaders_does_not_bend_the_curve() -> None:
    truth = Curve(50.0, 1000.0, 0.05)
    for seed in range(10):
        chance, model = random.Random(seed), ThroughputModel()
        for now, loaders in enumerate(loaders for loaders in (2, 4, 8) for _ in range(6)):
            model.add(measured(truth, loaders, chance), now)
        bad = measured(truth, 12, chance)
        for wait in (bad.wait, 5 * bad.wait):  # the first window after a resize is dropped
            model.add(Measurement(12, 32, bad.samples, wait, bad.use, bad.load), 20.0)
        assert model.curve(20.0).throughput(12) == pytest.approx(truth.throughput(12), rel=0.1)


def test_more_is_known_near_what_was_tried_and_with_more_numbers_tried() -> None:
    truth = Curve(50.0, 1000.0, 0.05)
    narrow, _ = learnt(truth, (2,), random.Random(1))
    wide, _ = learnt(truth, (2, 12), random.Random(1))
    assert narrow.throughput_error(2) / narrow.throughput(2) < narrow.throughput_error(16) / narrow.throughput(16)
    assert wide.throughput_error(16) < narrow.throughput_error(16)
    assert wide.share_error(11, 12) < wide.share_error(12)  # neighbours err together


@pytest.mark.parametrize("seed", range(5))
def test_curves_of_another_form_are_predicted(seed: int) -> None:
    """1/T = a/w + b, the form of torchloader's regressions: each number is left out in turn."""
    chance = random.Random(seed)
    a = 10 ** chance.uniform(-3, -1)
    b = a / 10 ** chance.uniform(0, 1.5)
    errors = []
    for held_out in (1, 2, 4, 8, 12, 16, 24, 32):
        model = ThroughputModel()
        for loaders in {1, 2, 4, 8, 12, 16, 24, 32} - {held_out}:
            for time in range(5):
                pace = (a / loaders + b) * chance.lognormvariate(0.0, 0.03)
                model.add(Measurement(loaders, 80, 1, max(0.0, pace - b), b, a), time)
        errors.append(abs(model.curve(5.0).throughput(held_out) * (a / held_out + b) - 1))
    assert statistics.fmean(errors) <= 0.1


def test_one_allocation_tells_what_a_loader_gives_and_what_training_takes() -> None:
    truth = Curve(100.0, 300.0, 0.0)
    for loaders in (0, 1, 3, 12):
        curve, _ = learnt(truth, (loaders,), random.Random(loaders))
        assert curve.rate == pytest.approx(truth.rate, rel=0.3)
        assert curve.ceiling == pytest.approx(truth.ceiling, rel=0.05)


def test_the_first_batches_are_an_estimate_also_while_the_job_is_resized() -> None:
    truth, chance, model = Curve(100.0, 300.0, 0.0), random.Random(1), ThroughputModel()
    model.add(measured(truth, 1, chance, noise=1.0, batches=1), 0.0)  # when the loaders start
    assert not model.is_estimated
    for loaders in (1, 2, 3):
        model.add(measured(truth, loaders, chance, batches=1), float(loaders))
    assert (model.is_estimated, model.is_measured) == (True, False)
    curve = model.curve(3.0)
    assert curve.rate == pytest.approx(truth.rate, rel=0.1)
    assert curve.ceiling == pytest.approx(truth.ceiling, rel=0.1)
    assert curve.throughput_error(4) > 0.02 * curve.throughput(4)


def test_a_job_is_nearly_fed_by_what_it_requests_before_it_is_measured() -> None:
    for requested in (1, 2, 4, 16):
        assert prior_curve(requested).share(requested) == pytest.approx(0.95)
    assert prior_curve(0) == prior_curve(1)


def test_without_loaders_training_and_loading_take_turns() -> None:
    assert Curve(100.0, 300.0).throughput(0) == pytest.approx(75.0)
    assert Curve(100.0, 300.0).throughput(0) < Curve(100.0, 300.0).throughput(1) < 100.0


def test_a_neighbour_on_the_device_is_followed_and_loading_stays_known() -> None:
    alone, chance = Curve(100.0, 1000.0, 0.02), random.Random(1)
    model = ThroughputModel()
    for second in range(40):
        model.add(measured(alone if second < 20 else alone.shared(2), 4, chance), second)
        if second == 20 + RECENT // 2:
            assert model.curve(second).ceiling == pytest.approx(500.0, rel=0.1)
    assert model.curve(40.0).rate == pytest.approx(100.0, rel=0.1)


def test_what_was_measured_long_ago_counts_little() -> None:
    chance, model = random.Random(1), ThroughputModel()
    for second in range(10):
        model.add(measured(Curve(100.0, 1000.0), 8, chance), second)
    for second in range(7200, 7212):
        model.add(measured(Curve(50.0, 1000.0), 2, chance), second)
    assert model.curve(7212.0).throughput(8) == pytest.approx(Curve(50.0, 1000.0).throughput(8), rel=0.2)


def test_the_prior_holds_until_something_is_measured() -> None:
    model = ThroughputModel()
    assert model.curve(0.0) == PRIOR
    for useless in (
        Measurement(2, 0, 32, 0, 1, 1),
        Measurement(2, 9, 32, float("nan"), 1, 1),
        Measurement(2, 9, 0, 1, 1, 1),
    ):
        model.add(useless, 0.0)
    assert not model.is_measured
    assert PRIOR.share_error(1) > 0.05
    earlier = Curve(10.0, 20.0)
    assert ThroughputModel(earlier).curve(0.0) == earlier


def test_few_batches_are_added_up_and_the_window_after_a_resize_is_dropped() -> None:
    truth, chance = Curve(100.0, 1000.0), random.Random(1)
    model = ThroughputModel()
    model.add(measured(truth.shared(2), 2, chance, batches=100), 0.0)  # so is the first
    model.add(measured(truth, 2, chance, batches=5), 0.0)
    assert not model.is_measured
    model.add(measured(truth, 2, chance, batches=5), 1.0)
    before = model.curve(1.0)
    model.add(measured(truth.shared(4), 8, chance, batches=100), 2.0)
    assert model.curve(2.0).throughput(8) == pytest.approx(before.throughput(8), rel=0.01)
    model.add(measured(truth.shared(4), 8, chance, batches=100), 3.0)
    assert model.curve(3.0).ceiling < before.ceiling


def test_a_loader_that_never_waits_and_says_nothing_still_has_a_curve() -> None:
    model = ThroughputModel()
    for second in range(2):
        model.add(Measurement(4, 50, 32, 0.0, 0.1, 0.0), second)
    assert model.curve(0.0).ceiling == pytest.approx(320.0)
    assert 0 < model.curve(0.0).share(4) <= 1


def test_a_beat_is_a_measurement() -> None:
    beat = Loading(4, 10, 0.1, 0.2, read=0.3, decode=0.2, collate=0.05, transfer=0.05, ready=1.0, mb=1.0)
    assert Measurement.from_beat(beat, 64) == Measurement(4, 10, 64, 0.1, 0.2, pytest.approx(0.6))
