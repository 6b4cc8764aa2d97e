"""Memory that creeps up."""

from __future__ import annotations

import math
import random

import pytest

from tests.core.detect.beats import SETTINGS, beat, findings
from torchloom.core.detect.detector import Finding
from torchloom.core.detect.rank_detectors import RankDetectors
from torchloom.protocol.phrase import Phrase, phrase

LIMIT = 64_000.0


def told(sizes: list[float], limit: float = LIMIT) -> list[tuple[int, Finding]]:
    beats = [beat(n, rss_mb=size, free_mb=limit - size) for n, size in enumerate(sizes)]
    return findings(RankDetectors(SETTINGS), beats)


def level(count: int, seed: int = 1, size: float = 20_000.0, stray: float = 50.0) -> list[float]:
    chance = random.Random(seed)
    return [size + chance.gauss(0.0, stray) for _ in range(count)]


def test_a_leak_is_told_with_the_time_that_is_left() -> None:
    leak = [size + max(0, n - 100) * 100.0 for n, size in enumerate(level(300))]
    ((begun, found),) = told(leak)
    assert found.kind == "memory"
    assert 100 < begun <= 150
    assert isinstance(found.what, Phrase)
    assert (found.what.code, found.what.args["what"]) == ("memory_grows", phrase("memory_of_process"))
    assert found.what.args["rate"] == pytest.approx(60 * 100.0, rel=0.2)
    assert found.what.args["left"] == pytest.approx((LIMIT - leak[begun]) / 100.0, rel=0.2)


def test_a_leak_that_ends_is_over() -> None:
    leak = [size + min(max(0, n - 100), 100) * 200.0 for n, size in enumerate(level(400))]
    assert [one.over for _, one in told(leak)] == [False, True]


def test_noise_gives_none_even_where_little_is_left() -> None:
    for seed in range(10):
        for stray in (50.0, 500.0):
            assert told(level(600, seed, size=62_000.0, stray=stray)) == []


def test_a_one_time_growth_gives_none() -> None:
    for at in range(60, 90):
        assert told([size + 30_000.0 * (n > at) for n, size in enumerate(level(300))]) == []


def test_caches_that_fill_up_at_the_start_give_none() -> None:
    assert told([size + 20_000.0 * (1 - math.exp(-n / 15)) for n, size in enumerate(level(300))]) == []


def test_a_sawtooth_gives_none() -> None:
    assert told([size + (n % 12) * 400.0 for n, size in enumerate(level(600))]) == []


def test_growth_that_would_take_days_gives_none() -> None:
    assert told([size + n * 1.0 for n, size in enumerate(level(600))]) == []


def test_without_a_limit_nothing_can_run_full() -> None:
    sizes = [1000.0 + 500 * n for n in range(300)]
    assert told(sizes, limit=math.inf) == []
    assert findings(RankDetectors(SETTINGS), [beat(n, rss_mb=size) for n, size in enumerate(sizes)]) == []


@pytest.mark.parametrize("share", [0.3, 0.9])
def test_the_memory_of_a_device_is_watched_too(share: float) -> None:
    sizes = [80_000.0 * share + max(0, n - 60) * 60.0 for n in range(500)]
    beats = [beat(n, device_mb=size, device_free_mb=80_000.0 - size) for n, size in enumerate(sizes)]
    found = findings(RankDetectors(SETTINGS), beats)
    what = found[0][1].what
    assert isinstance(what, Phrase)
    assert what.args["what"] == phrase("memory_of_device")


def test_what_the_machine_has_left_is_taken_from_the_beat() -> None:
    leak = [size + max(0, n - 100) * 100.0 for n, size in enumerate(level(300))]
    beats = [beat(n, rss_mb=size, free_mb=LIMIT - size) for n, size in enumerate(leak)]
    ((_, found),) = findings(RankDetectors(SETTINGS), beats)
    assert found.kind == "memory"
    (limit,) = found.evidence
    assert isinstance(limit, Phrase)
    assert (limit.code, limit.args["limit"]) == ("memory_limit", LIMIT)
