"""How long a step of a rank may take."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tests.core.detect.beats import SETTINGS, beat, findings, times
from torchloom.core.detect.rank_detectors import RankDetectors
from torchloom.core.detect.step_time import StepTimeBaseline

MINUTE, HOUR = 60, 3600


def paced(beats: int = 30, p50: float = 0.1, start: float = 0.0) -> StepTimeBaseline:
    """A rank that has made regular steps for a while."""
    pace = StepTimeBaseline(SETTINGS)
    for n in range(beats):
        pace.hear(times(p50), start + n)
    return pace


def test_before_the_first_steps_a_rank_may_load_and_compile() -> None:
    pace = StepTimeBaseline(SETTINGS)
    assert not pace.started
    assert pace.limit(SETTINGS) == SETTINGS.first_step_seconds
    pace.hear(times(40.0, count=1), 60.0)
    assert pace.limit(SETTINGS) == SETTINGS.first_step_seconds


def test_the_compiling_first_step_is_no_measure_for_the_next() -> None:
    pace = StepTimeBaseline(SETTINGS)
    pace.hear(times(0.1, longest=300.0), 0.0)
    for n in range(1, 30):
        pace.hear(times(), float(n))
    assert pace.limit(SETTINGS) == SETTINGS.hang_floor_seconds


def test_short_steps_have_the_floor_as_their_limit_and_long_ones_their_own_pace() -> None:
    assert paced(p50=0.01).limit(SETTINGS) == SETTINGS.hang_floor_seconds
    assert paced(p50=10.0).limit(SETTINGS) == SETTINGS.hang_factor * 12.0


def test_a_few_stray_steps_do_not_move_the_p99() -> None:
    pace = paced(200, p50=1.0)
    before = pace.p99
    for n in range(200, 400):
        slow = 9.0 if n in (210, 290) else 1.2
        pace.hear(times(1.0, p99=slow), float(n))
    assert pace.p99 == before


def test_the_p99_follows_the_rank_both_ways_within_minutes() -> None:
    pace = paced(300, p50=1.0)
    for n in range(300, 300 + 5 * MINUTE):
        pace.hear(times(3.0), float(n))
    assert pace.p99 > 3.0
    for n in range(600, 600 + 5 * MINUTE):
        pace.hear(times(0.5), float(n))
    assert pace.p99 < 1.0


def test_an_evaluation_each_epoch_is_known_after_its_first_time() -> None:
    pace = paced(3 * HOUR)
    now = 3.0 * HOUR
    for epoch in range(4):
        assert (pace.limit(SETTINGS) > 300.0) == (epoch > 0)
        now += 300.0  # it evaluates and does not say so
        pace.hear(times(0.1, longest=300.0), now)
        for n in range(3 * HOUR):
            pace.hear(times(), now + n)
        now += 3 * HOUR
    assert pace.pause == 300.0


def test_a_pause_of_its_kind_fades_but_is_not_forgotten_when_something_is_to_be_done() -> None:
    pace = paced(600)
    pace.hear(times(0.1, longest=400.0), 1000.0)
    assert pace.limit(SETTINGS) == 600.0
    for n in range(2 * HOUR):
        pace.hear(times(), 1000.0 + n)
    assert pace.limit(SETTINGS) == SETTINGS.hang_floor_seconds
    assert pace.pause == 400.0


def test_steps_that_are_long_against_milliseconds_only_are_ordinary() -> None:
    pace = paced(p50=0.001)
    assert pace.notable > 50 * pace.p99
    pace.hear(times(0.001, longest=0.05), 30.0)
    assert pace.pause == pace.p99
    assert pace.limit(SETTINGS) == SETTINGS.hang_floor_seconds


def test_the_shortest_pause_that_moves_the_limit_is_noticed() -> None:
    pace = paced(p50=0.001)
    longest = SETTINGS.hang_floor_seconds / 1.49
    assert pace.notable < longest / 4
    pace.hear(times(0.001, longest=longest), 30.0)
    assert pace.limit(SETTINGS) == 1.5 * longest


def test_a_phase_that_was_announced_or_a_pause_that_was_ordered_teaches_nothing() -> None:
    for told in ({"phase": "eval"}, {"paused": True}):
        detectors = RankDetectors(SETTINGS)
        findings(detectors, [beat(n) for n in range(30)])
        pace = detectors.pace
        detectors.hear(beat(31, times=None, idle_seconds=1.0, **told), 31.0)
        detectors.hear(beat(32, times=times(0.1, longest=500.0)), 531.0)
        assert pace.pause < 1.0
        assert pace.limit(SETTINGS) == SETTINGS.hang_floor_seconds


def test_what_was_excused_teaches_nothing() -> None:
    pace = paced()
    pace.excuse()
    pace.hear(times(0.1, longest=500.0), 531.0)
    assert pace.pause < 1.0


@given(st.lists(st.floats(0.001, 100.0), min_size=5, max_size=80))
def test_no_step_that_a_rank_has_just_come_back_from_is_longer_than_the_limit(steps: list[float]) -> None:
    pace = StepTimeBaseline(SETTINGS)
    for n, step in enumerate(steps):
        pace.hear(times(step, p99=step), 100.0 * n)
        if n > 0 and pace.started:
            assert pace.limit(SETTINGS) >= min(step, *steps[1 : n + 1]) * 0.99
            assert pace.limit(SETTINGS) >= SETTINGS.hang_floor_seconds


def test_where_phases_are_frequent_the_limit_still_follows_the_steps() -> None:
    detectors = RankDetectors(SETTINGS)
    for n in range(2000):
        phase = "eval" if n % 4 == 3 else ""
        detectors.hear(beat(n, times=times(1.0 if n < 400 else 0.6, count=1), phase=phase), float(n))
    assert detectors.pace.p99 < 0.8
