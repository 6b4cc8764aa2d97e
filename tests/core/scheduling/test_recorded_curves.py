"""The throughput model on curves that real trainings measured (tests/fixtures/loader_curves.csv)."""

from __future__ import annotations

from statistics import fmean, median

import pytest

from tests.fixtures.record_loader_curves import NUMBERS, WORKLOADS, read
from torchloom.core.scheduling.throughput_model import Curve, Measurement, ThroughputModel

CURVES = read()


def learnt(curves: dict[int, list[Measurement]], tried: tuple[int, ...]) -> Curve:
    model, now = ThroughputModel(), 0.0
    for loaders in tried:
        for one in curves[loaders]:
            now += 0.5
            model.add(one, now)
    return model.curve(now)


def measured(windows: list[Measurement]) -> float:
    """Samples/s, without the windows after the resize."""
    return 1 / median((one.wait + one.use) / one.samples for one in windows[2:])


def errors(curves: dict[int, list[Measurement]], tried: tuple[int, ...]) -> list[float]:
    curve = learnt(curves, tried)
    held_out = [loaders for loaders in curves if loaders not in tried]
    return [abs(curve.throughput(loaders) / measured(curves[loaders]) - 1) for loaders in held_out]


def test_all_workloads_were_recorded_with_all_numbers_of_loaders() -> None:
    assert [*CURVES] == [workload.name for workload in WORKLOADS]
    assert all([*curves] == [*NUMBERS] for curves in CURVES.values())


@pytest.mark.parametrize(("tried", "most"), [((4,), 0.1), ((2, 5), 0.05), ((1, 4), 0.05), ((4, 1, 8), 0.05)])
def test_numbers_of_loaders_that_were_held_out_are_predicted(tried: tuple[int, ...], most: float) -> None:
    found = {name: fmean(errors(curves, tried)) for name, curves in CURVES.items()}
    assert fmean(found.values()) <= most, found


def left_out(curves: dict[int, list[Measurement]]) -> list[float]:
    """The errors of each number, predicted from all others."""
    return [error for one in curves for error in errors(curves, tuple(number for number in curves if number != one))]


def test_each_number_is_predicted_from_all_others() -> None:
    found = {name: fmean(left_out(curves)) for name, curves in CURVES.items()}
    assert fmean(found.values()) <= 0.05, found
