"""Lives of a rank are in the order in which they began."""

from __future__ import annotations

import random
import re

from torchloom.shared.incarnation import new_incarnation


def test_lives_begun_within_one_millisecond_are_in_order() -> None:
    lives = [new_incarnation(now_ms=5) for _ in range(50)]
    assert lives == sorted(set(lives))
    assert all(re.fullmatch("[0-9a-f]{24}", life) for life in lives)


def test_a_clock_that_is_behind_still_gives_a_newer_life() -> None:
    assert new_incarnation(now_ms=5, newer_than="0000ffffffff" + "f" * 12) > "0000ffffffff" + "f" * 12


def test_the_global_random_state_is_left_alone() -> None:
    before = random.getstate()
    new_incarnation()
    assert random.getstate() == before
