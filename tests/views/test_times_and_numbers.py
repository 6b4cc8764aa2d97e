"""Times and numbers as people read them."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import pytest

from torchloom.views.format.numbers import ago, clock, duration, number, size, sparkline, stamp, value


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (-3, "0.0 s"), (0.34, "0.3 s"), (9.94, "9.9 s"), (9.96, "10 s"), (59.4, "59 s"), (59.6, "1 min"),
        (61, "1 min 1 s"), (3599.9, "1 h"), (7800, "2 h 10 min"), (86_400 * 3 + 3600 * 4 + 5, "3 d 4 h"),
    ],
)  # fmt: skip
def test_durations_have_two_units_at_most(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_the_date_is_shown_where_it_is_not_today() -> None:
    noon = datetime(2026, 11, 15, 12, 0, 0).timestamp()
    assert clock(noon, noon + 60) == "12:00:00"
    assert clock(noon, noon + 86_400) == "2026-11-15 12:00:00"
    assert stamp(noon + 0.25) == "2026-11-15 12:00:00.250"
    assert ago(noon, noon + 5) == "5.0 s ago"


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "-"), (0.0, "0.0000"), (0.12346, "0.1235"), (0.0012, "0.0012"), (1.5, "1.500"), (1024.0, "1,024"),
     (123456.0, "123,456"), (0.00001, "1.000e-05"), (1e9, "1.000e+09"), (-2.25, "-2.250")],
)  # fmt: skip
def test_numbers_have_few_digits(value: float | None, text: str) -> None:
    assert number(value) == text


@pytest.mark.parametrize(
    ("held", "text"),
    [(True, "true"), (False, "false"), (3, "3"), (0.1, "0.1"), (3e-4, "0.0003"), (1e-9, "1e-09"), ("INFO", "INFO"),
     ((0.9, 0.999), "0.9,0.999")],
)  # fmt: skip
def test_a_knobs_value_reads_as_it_is_typed(held: Any, text: str) -> None:
    assert value(held) == text


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"), (7, "7 B"), (999, "999 B"), (1000, "1.0 kB"), (9_949, "9.9 kB"), (9_950, "10 kB"),
        (999_499, "999 kB"), (999_500, "1.0 MB"), (120_400_000, "120 MB"), (1_240_000_000, "1.2 GB"),
        (5 * 10**12, "5.0 TB"), (5 * 10**15, "5,000 TB"),
    ],
)  # fmt: skip
def test_sizes_have_few_digits(count: int, text: str) -> None:
    assert size(count) == text


def test_a_sparkline_shows_the_course_and_leaves_gaps() -> None:
    assert sparkline([1.0, 2.0, 3.0, 4.0], 4) == "▁▃▆█"
    assert sparkline([1.0, None, 3.0], 3) == "▁ █"
    assert sparkline([5.0, 5.0], 2) == "▁▁"
    assert sparkline([None, None], 2) == "  "
    assert sparkline([], 10) == ""
    assert len(sparkline([float(i) for i in range(1000)], 48)) == 48
