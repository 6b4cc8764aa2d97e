"""What an optimizer holds can be changed, and a change of lr survives whatever schedules it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import (
    ChainedScheduler,
    ConstantLR,
    CosineAnnealingLR,
    CosineAnnealingWarmRestarts,
    CyclicLR,
    ExponentialLR,
    LambdaLR,
    LinearLR,
    OneCycleLR,
    PolynomialLR,
    ReduceLROnPlateau,
    SequentialLR,
    StepLR,
)

from torchloom.errors import BadInput
from torchloom.knob_validation import check
from torchloom.threadlet.changes.knob import Knob
from torchloom.threadlet.changes.optimizer_knobs import optimizer_knobs

Make = Callable[[torch.optim.Optimizer, float], Any]
"""A scheduler whose every rate is multiplied by a factor from the beginning."""
SCHEDULES: dict[str, Make] = {
    "LambdaLR": lambda o, f: LambdaLR(o, lambda step: 1 / (1 + step)),
    "StepLR": lambda o, f: StepLR(o, 3, 0.5),
    "ExponentialLR": lambda o, f: ExponentialLR(o, 0.9),
    "CosineAnnealingLR": lambda o, f: CosineAnnealingLR(o, 12),
    "CosineAnnealingWarmRestarts": lambda o, f: CosineAnnealingWarmRestarts(o, 4),
    "PolynomialLR": lambda o, f: PolynomialLR(o, 30, 2.0),
    "OneCycleLR": lambda o, f: OneCycleLR(o, max_lr=f * 1.0, total_steps=30),
    "CyclicLR": lambda o, f: CyclicLR(o, base_lr=f * 0.1, max_lr=f * 1.0, step_size_up=4),
    "SequentialLR": lambda o, f: SequentialLR(
        o, [LinearLR(o, 0.1, total_iters=8), CosineAnnealingLR(o, 15)], milestones=[8]
    ),
    "SequentialLR to ExponentialLR": lambda o, f: SequentialLR(
        o, [ConstantLR(o, 0.5, 7), ExponentialLR(o, 0.8)], milestones=[7]
    ),
    "ChainedScheduler": lambda o, f: ChainedScheduler([ConstantLR(o, 0.1, 4), ExponentialLR(o, 0.9)], optimizer=o),
}
AT = 5
"""The step at which lr is changed."""


def parameter() -> torch.nn.Parameter:
    found = torch.nn.Parameter(torch.ones(2))
    found.grad = torch.zeros(2)
    return found


def sgd(lr: float = 0.1, **options: Any) -> torch.optim.SGD:
    return torch.optim.SGD([parameter()], lr=lr, momentum=0.9, **options)


def knobs(optimizer: torch.optim.Optimizer, scheduler: Any = None, name: str = "") -> dict[str, Knob]:
    return {knob.spec.name: knob for knob in optimizer_knobs(optimizer, scheduler, name)}


def rates(optimizer: torch.optim.Optimizer, scheduler: Any, steps: int) -> list[float]:
    found = []
    for _ in range(steps):
        optimizer.step()
        scheduler.step()
        found.append(float(optimizer.param_groups[0]["lr"]))
    return found


def test_sgd_and_adamw_offer_what_they_hold() -> None:
    adamw = torch.optim.AdamW([parameter()], lr=1e-3)
    assert set(knobs(sgd())) == {"lr", "momentum", "weight_decay"}
    assert set(knobs(adamw)) == {"lr", "betas", "weight_decay"}
    for name, value in {"lr": 3e-4, "betas": (0.8, 0.9), "weight_decay": 0.1}.items():
        knobs(adamw)[name].turn(value)
        assert adamw.param_groups[0][name] == value
        assert knobs(adamw)[name].read() == value


def test_values_that_would_break_an_optimizer_are_refused() -> None:
    offered = knobs(torch.optim.AdamW([parameter()], lr=1e-3))
    for name, value in {"lr": -1.0, "betas": (0.9, 1.0), "weight_decay": -0.1}.items():
        with pytest.raises(BadInput):
            check(offered[name].spec, value)


def test_each_group_has_knobs_of_its_own() -> None:
    optimizer = torch.optim.SGD([{"params": [parameter()], "lr": 0.1}, {"params": [parameter()], "lr": 0.2}])
    scheduler = ExponentialLR(optimizer, 0.5)
    offered = knobs(optimizer, scheduler)
    assert {"lr:0", "lr:1", "momentum:1"} <= set(offered)
    offered["lr:1"].turn(0.8)
    optimizer.step()
    scheduler.step()
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.05, 0.4])


def test_two_optimizers_are_told_apart_by_name() -> None:
    assert set(knobs(sgd(), name="critic")) == {"critic:lr", "critic:momentum", "critic:weight_decay"}


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("factor", [0.25, 8.0])
def test_a_changed_rate_goes_on_as_if_the_schedule_had_been_scaled_from_the_beginning(
    schedule: str, factor: float
) -> None:
    changed, scaled = sgd(0.1), sgd(factor * 0.1)
    steered, other = SCHEDULES[schedule](changed, 1.0), SCHEDULES[schedule](scaled, factor)
    rates(changed, steered, AT)
    rates(scaled, other, AT)
    knob = knobs(changed, steered)["lr"]
    knob.turn(factor * knob.read())  # type: ignore[operator,arg-type]
    assert changed.param_groups[0]["lr"] == pytest.approx(scaled.param_groups[0]["lr"])
    assert steered.get_last_lr() == pytest.approx(other.get_last_lr())
    assert rates(changed, steered, 20) == pytest.approx(rates(scaled, other, 20))


@pytest.mark.parametrize("kind", [CosineAnnealingLR, CosineAnnealingWarmRestarts])
def test_a_floor_stays_where_it_is(kind: Any) -> None:
    plain, steered = sgd(0.1), sgd(0.1)
    one, other = kind(plain, 10, eta_min=0.01), kind(steered, 10, eta_min=0.01)
    (before,) = {rates(plain, one, AT)[-1], rates(steered, other, AT)[-1]}
    knobs(steered, other)["lr"].turn(0.2)
    factor = (0.2 - 0.01) / (before - 0.01)
    expected = [0.01 + (rate - 0.01) * factor for rate in rates(plain, one, 12)]
    assert rates(steered, other, 12) == pytest.approx(expected)


def test_no_rate_becomes_negative_when_set_below_or_from_below_a_floor() -> None:
    for first, then in ((0.001, 0.5), (0.5, 0.001)):
        optimizer = sgd(0.1)
        scheduler = CosineAnnealingWarmRestarts(optimizer, 6, eta_min=0.01)
        rates(optimizer, scheduler, AT)
        for value in (first, then):
            knobs(optimizer, scheduler)["lr"].turn(value)
        assert min(rates(optimizer, scheduler, 20)) > 0


def test_a_plateau_reduces_from_the_new_rate_and_keeps_its_floor() -> None:
    optimizer = sgd(0.1)
    scheduler = ReduceLROnPlateau(optimizer, patience=0, factor=0.1, min_lr=0.001)
    knobs(optimizer, scheduler)["lr"].turn(0.5)
    for loss in (1.0, 2.0):
        scheduler.step(loss)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.05)
    assert scheduler.min_lrs == [0.001]


def test_from_a_rate_of_zero_the_new_rate_is_the_base() -> None:
    optimizer = sgd(0.1)
    scheduler = LambdaLR(optimizer, lambda step: min(1.0, step / 10))  # warms up from nothing
    knobs(optimizer, scheduler)["lr"].turn(0.4)
    assert rates(optimizer, scheduler, 10)[-1] == pytest.approx(0.4)


def test_a_rate_that_is_a_tensor_stays_the_same_tensor_and_is_scheduled_on() -> None:
    lr = torch.tensor(0.1)
    optimizer = torch.optim.Adam([parameter()], lr=lr, capturable=False, foreach=False)
    scheduler = LambdaLR(optimizer, lambda step: 0.5**step)
    rates(optimizer, scheduler, 2)
    kept = optimizer.param_groups[0]["lr"]
    knob = knobs(optimizer, scheduler)["lr"]
    knob.turn(0.5)
    assert optimizer.param_groups[0]["lr"] is kept  # what a captured graph refers to
    assert knob.read() == pytest.approx(0.5)
    assert rates(optimizer, scheduler, 2) == pytest.approx([0.25, 0.125])


def test_what_a_scheduler_sets_at_every_step_is_not_offered() -> None:
    optimizer = sgd()
    assert "momentum" not in knobs(optimizer, OneCycleLR(optimizer, 1.0, total_steps=10))
    assert "momentum" in knobs(optimizer, OneCycleLR(optimizer, 1.0, total_steps=10, cycle_momentum=False))


def test_a_knob_reaches_the_optimizer_also_after_it_has_loaded_a_state() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    knobs = {knob.spec.name: knob for knob in optimizer_knobs(optimizer)}
    optimizer.load_state_dict(
        optimizer.state_dict() | {"param_groups": [optimizer.state_dict()["param_groups"][0] | {"lr": 0.2}]}
    )
    assert knobs["lr"].read() == 0.2
    knobs["lr"].turn(0.3)
    assert optimizer.param_groups[0]["lr"] == 0.3
