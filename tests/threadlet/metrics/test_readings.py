"""Turning what step() kept into numbers."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import numpy as np
import pytest
import torch

from torchloom.threadlet.metrics.readings import Reader, find_bad_steps, judge, reading


@pytest.mark.parametrize(
    "value", [2, 2.0, np.float32(2), np.array([2.0]), torch.tensor(2.0), torch.tensor([[2]]), torch.tensor(2.0).half()]
)
def test_whatever_is_one_number_is_read(value: Any) -> None:
    assert reading(value) == (2.0, "")


@pytest.mark.parametrize(
    "value",
    [
        "2",
        b"2",
        None,
        [2],
        1j,
        object(),
        10**400,
        torch.ones(2),
        np.ones(2),
        np.array("2"),
        torch.ones((), device="meta"),
    ],
)
def test_whatever_is_not_one_number_is_refused_with_a_reason(value: Any) -> None:
    number, why = reading(value)
    assert number is None
    assert why


def test_a_tensor_whose_reading_could_need_its_peers_is_not_read() -> None:
    collectives = []

    class Sharded(torch.Tensor):
        def item(self) -> float:  # type: ignore[override]
            collectives.append("on the wrong thread")
            return 1.0

    number, why = reading(torch.ones(()).as_subclass(Sharded))
    assert number is None
    assert "Sharded" in why
    assert collectives == []


def test_values_that_are_not_finite_are_named_and_left_out_until_they_are_finite_again() -> None:
    readings = Reader()
    readings.learn(judge({"loss": float("nan"), "a": torch.tensor(float("inf")), "b": 1.0}))
    assert (readings.loss, readings.metrics, readings.not_finite) == (None, {"b": 1.0}, {"loss", "a"})
    readings.learn(judge({"loss": 3.0}))
    assert (readings.loss, readings.not_finite) == (3.0, {"a"})


async def test_a_value_is_judged_once() -> None:
    reader = Reader()
    values = {"loss": "text"}
    for _ in range(3):
        await reader.refresh(values, 60)
    assert reader.dropped == 1


async def test_a_device_that_hangs_holds_up_neither_the_beat_nor_what_is_known() -> None:
    answers = threading.Event()

    class OnHungDevice:
        def item(self) -> float:
            answers.wait(60)
            return 7.0

    reader = Reader()
    await reader.refresh({"loss": 5.0}, 60)
    await asyncio.wait_for(reader.refresh({"loss": OnHungDevice()}, 0.01), 30)
    await asyncio.wait_for(reader.refresh({"loss": 6.0}, 0.01), 30)
    assert reader.loss == 5.0
    answers.set()
    await reader.refresh({}, 60)
    assert reader.loss == 7.0


async def test_where_a_loss_went_bad_is_found_and_forgotten_when_it_is_well_again() -> None:
    reader = Reader()
    nan = torch.tensor(float("nan"))
    losses = [(10, 1.0), (12, torch.tensor(2.0)), (14, nan), (16, nan)]
    await reader.refresh({"loss": nan}, 60, losses)
    assert reader.bad_steps == (13, 14)
    await reader.refresh({"loss": torch.tensor(float("nan"))}, 60, [(90, nan)])
    assert reader.bad_steps == (13, 14)  # where it began, not where it is
    await reader.refresh({"loss": 1.0}, 60, [])
    assert reader.bad_steps is None


def test_a_loss_that_was_never_well_went_bad_where_it_was_first_seen() -> None:
    assert find_bad_steps([(5, float("inf")), (6, 1.0)]) == (5, 5)
    assert find_bad_steps([(5, 1.0)]) is None
