"""The fewest loaders that keep training fed, and what is measured of a loader."""

from __future__ import annotations

import math
import time
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from tests.data.samples import Large, Numbers
from torchloom.data import ElasticLoader, autotune, decoding
from torchloom.data.autotune import FED, Chooser, Tuner, Tuning
from torchloom.data.stage_times import LoadingMeter, StageTimes
from torchloom.errors import BadInput
from torchloom.protocol.data_loading import Loading


def window(loaders: int, load: float, use: float, cores: float = 64.0) -> Loading:
    """What a loader measures: beyond the cores, processes slow each other down."""
    slowed = load * max(1.0, loaders / cores)
    wait = max(0.0, slowed / loaders - use) if loaders else load
    return Loading(
        loaders=loaders, batches=32, wait=wait, use=use, read=0.0, decode=slowed, collate=0.0, transfer=0.0,
        ready=0.0, mb=1.0,
    )  # fmt: skip


def settle(load: float, use: float, most: int = 64, cores: float = 64.0, start: int = 1, windows: int = 80) -> Tuning:
    chooser, count = Chooser(most), start
    for _ in range(windows):
        choice = chooser.choose(window(count, load, use, cores))
        count = choice.loaders
    return choice


@given(st.floats(0.001, 1.0), st.floats(0.01, 1.0), st.integers(0, 40))
def test_the_fewest_that_feed_training_are_found_from_anywhere(load: float, use: float, start: int) -> None:
    choice = settle(load, use, start=start)
    seen = window(choice.loaders, load, use)
    fewest = next((n for n in range(1, 65) if window(n, load, use).wait <= FED * use), 64)
    if fewest == 64:
        assert choice.loaders == 64
    else:
        assert seen.wait <= FED * (seen.wait + use)
        assert fewest <= choice.loaders <= autotune.MARGIN * load / use + 1 or choice.loaders == max(start, 1)


def test_more_than_are_allowed_are_not_started() -> None:
    choice = settle(load=1.0, use=0.01, most=6)
    assert (choice.loaders, choice.reason) == (6, "limit")


def test_what_does_not_help_is_taken_back() -> None:
    choice = settle(load=0.5, use=0.01, cores=2.0)
    assert choice.reason == "no_help"
    assert choice.loaders < 64
    assert window(choice.loaders, 0.5, 0.01, 2.0).wait == pytest.approx(0.24), "as good as with all of them"


def test_fewer_are_run_only_after_several_windows_agree() -> None:
    chooser = Chooser(64)
    counts = [chooser.choose(window(10, 0.02, 0.01)).loaders for _ in range(3)]
    assert counts == [10, 10, 3]


def test_a_choice_says_why() -> None:
    text = str(Tuning(3, "starved", load=0.024, use=0.01, wait=0.014))
    times = "a batch takes 24 ms to load, and training uses it for 10 ms and waits 14 ms"
    assert text == f"3 loaders: training waited for data; {times}"


class Slow(Numbers):
    def __getitem__(self, index: int) -> Any:
        with decoding():
            time.sleep(0.01)
        return super().__getitem__(index)


def test_a_running_loader_grows_until_it_is_told_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(autotune, "LEAST_SECONDS", 0.0)
    monkeypatch.setattr(autotune, "LEAST_BATCHES", 8)
    loader = ElasticLoader(Slow(100), batch_size=1, num_workers=1)
    loader.autotune(most=3)
    assert loader.tuning is None
    seen = [int(batch[0, 0]) for batch in loader]
    assert seen == list(range(100))
    assert loader.num_workers > 1
    assert loader.tuning is not None
    loader.resize(1)
    assert loader.tuning is None, "a person has chosen"
    list(loader)
    assert loader.num_workers == 1


@pytest.mark.parametrize("most", [0, -1, True, 1.5])
def test_a_bad_limit(most: Any) -> None:
    with pytest.raises(BadInput):
        ElasticLoader(Numbers(4)).autotune(most)


# What is measured


@pytest.mark.parametrize("count", [0, 2])
def test_the_stages_of_a_batch_are_measured(count: int) -> None:
    loader = ElasticLoader(Slow(12), batch_size=3, num_workers=count, collate_fn=collate_slowly)
    for _ in loader:
        time.sleep(0.01)
    seen = loader.measure()
    assert (seen.batches, seen.loaders) == (4, count)
    assert seen.decode >= 0.03
    assert seen.collate >= 0.02
    assert seen.use > 0.0
    assert 0.0 < seen.read < seen.decode
    assert loader.measure().batches == 0, "since the last time"


def collate_slowly(samples: list[Any]) -> Any:
    time.sleep(0.02)
    return torch.stack(samples)


def test_the_size_of_batches_is_measured() -> None:
    loader = ElasticLoader(Large(8), batch_size=2, num_workers=1)
    list(loader)
    assert loader.measure().mb == pytest.approx(0.16, abs=0.01)


def loaded_in_turn(loaders: int, load: float, use: float, shards: int) -> Loading:
    """What a loader of an IterableDataset measures: a process loads its shards one after the other."""
    wait = max(0.0, math.ceil(shards / loaders) * load / shards - use)
    return replace(window(loaders, load, use), wait=wait)


@pytest.mark.parametrize(("use", "chosen"), [(0.13, 1), (0.07, 2), (0.045, 3), (0.025, 6), (0.001, 6)])
def test_only_numbers_of_loaders_that_can_be_faster_are_tried_for_shards(use: float, chosen: int) -> None:
    for start in range(1, 7):
        chooser, count, tried = Chooser(64, shards=6), start, []
        for _ in range(30):
            count = chooser.choose(loaded_in_turn(count, 0.1, use, 6)).loaders
            tried.append(count)
        assert count == chosen
        assert set(tried) - {start} <= {1, 2, 3, 6}


def test_fewer_that_were_not_enough_are_not_tried_again_until_less_is_needed() -> None:
    chooser, count, tried = Chooser(8), 6, []
    for _ in range(40):
        seen = window(count, 0.04, 0.01)  # five with the margin, says the calculation; and yet training waits
        count = chooser.choose(seen if count == 6 else replace(seen, wait=0.01)).loaders
        tried.append(count)
    assert tried.count(5) == 1
    assert count == 6
    for _ in range(4):
        count = chooser.choose(window(count, 0.02, 0.01)).loaders
    assert count == 3


@pytest.mark.parametrize(
    ("chooser", "reason"),
    [(Chooser(2), "limit"), (Chooser(2, limit="cores"), "cores"), (Chooser(4, shards=2), "shards")],
)
def test_the_reason_is_what_allows_no_more(chooser: Chooser, reason: str) -> None:
    assert chooser.choose(window(2, 0.1, 0.01)).reason == reason


def test_slow_batches_are_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(autotune, "clock", lambda: now)
    meter = LoadingMeter()
    tuner = Tuner(meter, 8)
    for _ in range(4):
        meter.loaded(StageTimes(3.0, 0.0, 0.0), 0.0, 0)
        meter.yielded(0.1, 2.9, 0)
        now += 3.0
        chosen = tuner.note_batch(1)
    assert chosen is not None
    assert chosen > 1


def test_more_than_are_allowed_are_ended() -> None:
    choice = Chooser(2).choose(window(5, 0.1, 0.1))
    assert (choice.loaders, choice.reason) == (2, "limit")
