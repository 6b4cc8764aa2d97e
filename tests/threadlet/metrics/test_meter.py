"""What step() measures, with a clock of the test's own."""

from __future__ import annotations

import gc
import statistics
import time
import weakref
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from torchloom.protocol.rank import MAX_METRICS, StepTimes
from torchloom.shared.liveness_page import PAUSED, STEP
from torchloom.threadlet.metrics.meter import RING, Meter


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def meter(clock: Clock) -> Meter:
    return Meter(clock)


def step(meter: Meter, loss: Any = None, samples: Any = None, number: Any = None, **metrics: Any) -> None:
    meter.step(loss, samples, number, metrics)


def test_a_stretch_has_the_durations_between_its_steps(meter: Meter, clock: Clock) -> None:
    for tenths in [0, *range(1, 101)]:
        clock.now += tenths / 10
        step(meter)
    times = meter.take().times
    assert times is not None
    assert times.count == 100
    assert times.p50 == pytest.approx(5.1)
    assert times.p99 == pytest.approx(10.0)
    assert times.longest == pytest.approx(10.0)
    assert meter.take().times is None


def test_a_first_step_has_no_duration(meter: Meter) -> None:
    step(meter)
    stretch = meter.take()
    assert (stretch.step, stretch.times, stretch.samples_per_second) == (1, None, None)


def test_samples_a_second_do_not_depend_on_when_the_beat_falls(meter: Meter, clock: Clock) -> None:
    for _ in range(3):
        clock.now += 0.5
        step(meter, samples=32)
    clock.now += 0.4  # a beat in the middle of a step
    assert meter.take().samples_per_second == pytest.approx(64)
    clock.now += 0.1
    step(meter, samples=32)
    assert meter.take().samples_per_second == pytest.approx(64)


def test_more_steps_than_the_ring_holds_are_all_counted(meter: Meter, clock: Clock) -> None:
    for _ in range(RING + 11):
        clock.now += 1
        step(meter)
    times = meter.take().times
    assert times is not None
    assert (times.count, times.p50) == (RING + 10, 1)


def test_the_step_number_goes_on_from_where_it_was_set(meter: Meter) -> None:
    step(meter, number=1000)
    step(meter)
    assert meter.step_number == 1001


def steps(meter: Meter, clock: Clock, count: int, seconds: float = 1.0) -> None:
    for _ in range(count):
        clock.now += seconds
        step(meter)


def times(meter: Meter) -> StepTimes:
    found = meter.take().times
    assert found is not None
    return found


def test_a_gap_belongs_to_no_step(meter: Meter, clock: Clock) -> None:
    steps(meter, clock, 3)
    with meter.aside(meter.gaps):
        clock.now += 100
    steps(meter, clock, 1)
    assert times(meter).longest == pytest.approx(1)
    assert meter.median_step_seconds() == pytest.approx(1)


def test_steps_made_within_a_gap_keep_their_time(meter: Meter, clock: Clock) -> None:
    steps(meter, clock, 1)
    with meter.aside(meter.gaps):
        steps(meter, clock, 3)
        clock.now += 5
    found = times(meter)
    assert (found.count, found.p50) == (3, pytest.approx(1))
    steps(meter, clock, 1)
    assert times(meter).p50 == pytest.approx(1)


def test_own_time_is_a_steps_without_waiting_for_peers_and_data(meter: Meter, clock: Clock) -> None:
    meter.waits_from = 0
    step(meter)
    for _ in range(3):
        with meter.aside(meter.loading):
            clock.now += 2
        clock.now += 1
        with meter.aside(meter.waiting):
            clock.now += 4
            with meter.aside(meter.loading):  # part of the outer one, which waits for peers
                clock.now += 1
        step(meter)
    found = times(meter)
    assert (found.p50, found.own, found.data) == (pytest.approx(8), pytest.approx(1), pytest.approx(2))


def test_own_time_is_told_from_where_on_waiting_is_known(meter: Meter, clock: Clock) -> None:
    steps(meter, clock, 3)
    assert (times(meter).own, meter.loading.latest) == (None, 0)
    steps(meter, clock, 2, seconds=10)
    meter.waits_from = 6
    steps(meter, clock, 1, seconds=10)
    assert times(meter).own is None
    steps(meter, clock, 1, seconds=3)
    found = times(meter)
    assert (found.own, found.data) == (pytest.approx(3), None)


def test_a_place_in_the_ring_is_of_one_step_alone(meter: Meter, clock: Clock) -> None:
    with meter.aside(meter.waiting):
        clock.now += 50
    steps(meter, clock, RING)
    assert (meter.waiting.of(1), meter.waiting.of(RING + 1)) == (50, 0)
    with meter.aside(meter.waiting):
        clock.now += 1
    assert (meter.waiting.of(1), meter.waiting.of(RING + 1)) == (0, 1)


def test_it_stands_still_since_its_last_sign_of_progress(meter: Meter, clock: Clock) -> None:
    clock.now += 3
    assert meter.still() == 3
    step(meter)
    clock.now += 2
    assert meter.still() == 2
    with meter.aside(meter.gaps):
        clock.now += 60
        assert meter.still() == 62
    assert meter.still() == 0
    with meter.paused():
        clock.now += 60
        assert (meter.still(), meter.marks[PAUSED]) == (0, 1)
    clock.now += 1
    assert (meter.still(), meter.marks[PAUSED]) == (1, 0)
    meter.resume_at(7)
    assert (meter.still(), meter.marks[STEP]) == (0, 7)


def test_a_kept_loss_does_not_keep_its_graph_alive(meter: Meter) -> None:
    class Weight(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
            return grads[0]

    loss = Weight.apply(torch.ones((), requires_grad=True))
    graph = weakref.ref(loss.grad_fn)
    step(meter, loss, grad_norm=loss)
    del loss
    gc.collect()
    assert graph() is None
    assert float(meter.values["loss"]) == 2


def test_names_beyond_the_limit_are_dropped_and_counted(meter: Meter) -> None:
    for i in range(MAX_METRICS + 5):
        step(meter, loss=1.0, **{f"m{i}": 1.0})
    assert len(meter.values) == MAX_METRICS + 1
    assert meter.dropped == 5
    assert str(MAX_METRICS) in meter.complaint


@pytest.mark.parametrize("name", ["", "x" * 65, "a\nb", "\ud800"])
def test_unprintable_names_are_dropped_and_counted(meter: Meter, name: str) -> None:
    step(meter, **{name: 1.0})
    assert meter.values == {}
    assert meter.dropped == 1


class Hostile:
    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(name)

    def __float__(self) -> float:
        raise ValueError

    def __index__(self) -> int:
        raise ValueError


HOSTILE = [Hostile(), object(), "x", b"x", None, [], {}, float("nan"), float("inf"), -1, 10**400, 1j, True, Hostile]


@given(st.sampled_from(HOSTILE), st.sampled_from(HOSTILE), st.sampled_from(HOSTILE), st.sampled_from(HOSTILE))
def test_no_value_makes_step_raise_or_spoils_later_steps(loss: Any, samples: Any, number: Any, metric: Any) -> None:
    clock = Clock()
    meter = Meter(clock)
    step(meter, loss, samples, number, metric=metric)
    for _ in range(2):
        clock.now += 0.5
        step(meter, 0.5, 8)
    meter.take()
    clock.now += 0.5
    step(meter, 0.25, 8)
    stretch = meter.take()
    assert stretch.samples_per_second == pytest.approx(16)
    assert meter.values["loss"] == 0.25


def test_a_step_costs_a_few_microseconds() -> None:
    """On whatever machine: as much as this many times making a small tensor, which takes about one."""
    meter = Meter()
    loss = torch.ones(())
    costs, small = [], []
    for _ in range(2000):
        began = time.perf_counter_ns()
        meter.step(loss, 32, None, {"accuracy": 0.5})
        between = time.perf_counter_ns()
        torch.ones(())
        costs.append(between - began)
        small.append(time.perf_counter_ns() - between)
    assert statistics.median(costs) < 5 * statistics.median(small)
