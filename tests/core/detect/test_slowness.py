"""Ranks that slow down, starve, or lag behind their peers, and checkpoints that do not come."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.core.detect.beats import SETTINGS, beat, findings, noise, times
from torchloom.core.detect.checkpoint_overdue import CheckpointIntervalDetector
from torchloom.core.detect.detector import Finding
from torchloom.core.detect.rank_detectors import RankDetectors
from torchloom.core.detect.straggler import SURE, StragglerDetector
from torchloom.protocol.phrase import Phrase, phrase
from torchloom.protocol.rank import Beat
from torchloom.views.wording.phrases import render


def steps(count: int, p50: float = 0.1, seed: int = 1, **more: object) -> list[Beat]:
    return [beat(n, times=times(p50 * one), **more) for n, one in zip(range(count), noise(seed), strict=False)]


def kinds(told: list[tuple[int, Finding]]) -> list[tuple[str, bool]]:
    return [(one.kind, one.over) for _, one in told]


# ── slowdown ──


def test_a_slowdown_is_told_within_a_window_and_over_when_it_ends() -> None:
    told = findings(RankDetectors(SETTINGS), steps(60) + steps(40, 0.2) + steps(40))
    assert kinds(told) == [("slowdown", False), ("slowdown", True)]
    assert 60 < told[0][0] <= 70
    assert 100 < told[1][0] <= 110
    what = told[0][1].what
    assert isinstance(what, Phrase)
    assert (what.code, what.args["times"]) == ("steps_slower", pytest.approx(2.0, rel=0.1))


def test_single_slow_beats_are_no_slowdown() -> None:
    beats = [said for n in range(40) for said in (*steps(8, seed=n), *steps(3, 0.5, seed=n))]
    assert findings(RankDetectors(SETTINGS), steps(40) + beats) == []


def test_beats_that_always_differ_much_are_normal() -> None:
    chance = random.Random(2)
    beats = [beat(n, times=times(chance.choice([0.1, 0.3]))) for n in range(600)]
    assert findings(RankDetectors(SETTINGS), beats) == []


def test_after_a_change_of_values_a_new_normal_is_learnt() -> None:
    assert findings(RankDetectors(SETTINGS), steps(60) + steps(100, 0.3, change=1)) == []
    told = findings(RankDetectors(SETTINGS), steps(60) + steps(40, 0.3) + steps(100, 0.3, change=1))
    assert kinds(told) == [("slowdown", False), ("slowdown", True)]
    assert told[1][1].what == phrase("normal_learnt_again")


def test_a_larger_batch_takes_longer_and_is_no_slowdown() -> None:
    small, large = (steps(60, samples_per_second=320.0), steps(100, 0.2, samples_per_second=320.0))
    assert findings(RankDetectors(SETTINGS), small + large) == []
    for slow in (steps(100, 0.2, samples_per_second=160.0), steps(100, 0.4, samples_per_second=120.0)):
        assert kinds(findings(RankDetectors(SETTINGS), small + slow)) == [("slowdown", False)]


def test_a_rank_that_became_faster_is_measured_by_that() -> None:
    told = findings(RankDetectors(SETTINGS), steps(60, 0.2) + steps(80, 0.1) + steps(40, 0.19))
    assert kinds(told) == [("slowdown", False)]


# ── starved ──


def fed(count: int, share: float) -> list[Beat]:
    return [beat(n, times=times(data=0.1 * share)) for n in range(count)]


def test_a_rank_that_waits_for_data_most_of_the_time_is_starved_until_it_hardly_does() -> None:
    told = findings(RankDetectors(SETTINGS), fed(20, 0.1) + fed(20, 0.7) + fed(20, 0.4) + fed(20, 0.1))
    assert kinds(told) == [("starved", False), ("starved", True)]
    assert 20 < told[0][0] < 40
    assert told[1][0] >= 60


def test_a_rank_that_is_starved_says_at_each_beat_that_it_waits_for_data() -> None:
    beats = [beat(n, times=times(data=0.08), phase="data") for n in range(20)]
    detectors = RankDetectors(SETTINGS)
    assert kinds(findings(detectors, beats)) == [("starved", False)]
    assert detectors.pace.started


def test_a_few_beats_without_data_are_none() -> None:
    assert findings(RankDetectors(SETTINGS), (fed(12, 0.1) + fed(4, 0.9)) * 10) == []


# ── stragglers ──


def own(count: int, factor: float = 1.0, seed: int = 0) -> list[float]:
    return [0.1 * factor * one for one, _ in zip(noise(seed), range(count), strict=False)]


def looked(race: StragglerDetector[int], own: dict[int, list[float]]) -> tuple[tuple[int, Finding], ...]:
    """What is found by as many looks as are needed to be sure."""
    return tuple(one for _ in range(SURE) for one in race.look(own, SETTINGS))


@pytest.mark.parametrize("ranks", [2, 3, 8, 64, 4000])
def test_the_slow_one_of_any_number_of_ranks_is_found_and_scored(ranks: int) -> None:
    race: StragglerDetector[int] = StragglerDetector()
    told = looked(race, {rank: own(10, 2.0 if rank == 1 else 1.0, rank) for rank in range(ranks)})
    ((rank, found),) = told
    assert (rank, found.kind, found.over) == (1, "straggler", False)
    assert 1.7 < found.what.args["times"] < 2.3
    assert race.slow == {1}


@pytest.mark.wording
@pytest.mark.parametrize(
    ("ranks", "peers", "measure"), [(2, "its peer", "; the other needs "), (3, "its peers", " the 2 others is ")]
)
def test_one_peer_is_not_called_several(ranks: int, peers: str, measure: str) -> None:
    race: StragglerDetector[int] = StragglerDetector()
    ((_, found),) = looked(race, {rank: own(10, 2.0 if rank == 1 else 1.0, rank) for rank in range(ranks)})
    (evidence,) = found.evidence
    assert render(found.what).endswith(f" times as long as {peers}")
    assert measure in render(evidence)


def test_a_straggler_is_told_once_and_over_only_when_it_is_clearly_as_fast_as_the_others() -> None:
    race: StragglerDetector[int] = StragglerDetector()
    told = [
        race.look({0: [0.1] * 10, 1: [0.1 * f] * 10, 2: [0.1] * 10}, SETTINGS)
        for f in (1.6, 1.6, 1.2, 1.6, 1.6, 1.6, 1.6, 1.4, 1.4, 1.2, 1.2)
    ]
    assert SURE == 3
    begins, over = [False], [True]
    assert [[one.over for _, one in some] for some in told] == [[], [], [], [], [], begins, [], [], [], over, []]


def test_too_few_slow_beats_or_a_single_rank_say_nothing() -> None:
    race: StragglerDetector[int] = StragglerDetector()
    assert race.look({0: own(7, 3.0), 1: own(10)}, SETTINGS) == ()
    assert race.look({0: own(10, 3.0)}, SETTINGS) == ()
    assert race.look({0: own(3) + own(7, 3.0), 1: own(10)}, SETTINGS) == ()
    assert race.look({0: [], 1: [0.0] * 10, 2: [0.0] * 10}, SETTINGS) == ()


def test_where_every_rank_differs_from_beat_to_beat_none_is_a_straggler() -> None:
    quick, slow = [0.1], [0.3]
    ranks = {0: 8 * slow + 2 * quick, 1: 4 * slow + 6 * quick, 2: 4 * slow + 6 * quick}
    assert looked(StragglerDetector[int](), ranks) == ()
    assert looked(StragglerDetector[int](), {**ranks, 1: 10 * quick, 2: 10 * quick}) != ()


def test_a_rank_that_noise_made_look_slow_is_none_and_a_slow_one_among_noisy_ranks_is() -> None:
    """Own times of a busy machine: each beat is either 5 or 12 ms, and by chance one rank had most of the slow ones."""
    quick, slow = [0.005], [0.012]
    usual = 4 * (3 * quick + slow)
    unlucky, lame = 3 * quick + 13 * slow, [2 * one for one in usual]
    assert looked(StragglerDetector[int](), {0: unlucky, 1: usual, 2: usual, 3: usual}) == ()
    assert [rank for rank, _ in looked(StragglerDetector[int](), {0: lame, 1: usual, 2: usual, 3: usual})] == [0]


def test_a_beat_that_holds_an_evaluation_makes_no_straggler() -> None:
    usual = own(16, seed=1)
    odd = [*own(8, seed=2), *own(7, 1.35, seed=3), 20.0]
    assert looked(StragglerDetector[int](), {0: odd, 1: usual, 2: own(16, seed=4)}) == ()


@given(st.lists(st.floats(0.09, 0.11), min_size=3, max_size=12), st.floats(1.9, 50.0), st.data())
def test_among_similar_ranks_only_the_slow_one_is_blamed(
    peers: list[float], factor: float, data: st.DataObject
) -> None:
    slow = data.draw(st.integers(0, len(peers) - 1))
    ranks = {rank: [one * (factor if rank == slow else 1)] * 10 for rank, one in enumerate(peers)}
    assert [rank for rank, _ in looked(StragglerDetector[int](), ranks)] == [slow]


def test_own_times_are_kept_of_the_latest_beats_only() -> None:
    detectors = RankDetectors(replace(SETTINGS, straggler_beats=2))
    findings(detectors, [beat(n, times=times(own=float(n))) for n in range(20)])
    assert list(detectors.own) == [13.0, 14.0, 15.0, 16.0, 17.0, 18.0, 19.0]


# ── checkpoints ──


def saved_every(interval: float, count: int) -> CheckpointIntervalDetector:
    saves = CheckpointIntervalDetector()
    for n in range(count):
        saves.saved(interval * (n + 1))
    return saves


def test_a_checkpoint_that_does_not_come_is_told_once_and_ends_with_the_next() -> None:
    saves = saved_every(100.0, 5)
    assert saves.look(790.0, SETTINGS, trains=True) is None
    found = saves.look(801.0, SETTINGS, trains=True)
    assert found is not None
    assert found.kind == "overdue"
    assert saves.overdue
    assert saves.look(900.0, SETTINGS, trains=True) is None
    saves.saved(1000.0)
    assert not saves.overdue
    assert saves.look(2000.0, SETTINGS, trains=True) is not None


def test_two_checkpoints_are_no_habit_and_a_minute_is_no_delay() -> None:
    assert saved_every(100.0, 2).look(100_000.0, SETTINGS, trains=True) is None
    assert saved_every(5.0, 5).look(25.0 + 59.0, SETTINGS, trains=True) is None
    assert saved_every(5.0, 5).look(25.0 + 61.0, SETTINGS, trains=True) is not None


def test_a_pause_is_not_held_against_the_job() -> None:
    saves = saved_every(100.0, 5)
    assert saves.look(550.0, SETTINGS, trains=True) is None
    for now in range(560, 5550, 10):
        assert saves.look(float(now), SETTINGS, trains=False) is None
    assert saves.look(5790.0, SETTINGS, trains=True) is None
    assert saves.look(5801.0, SETTINGS, trains=True) is not None  # 5,000 s later than without the pause, less a look
