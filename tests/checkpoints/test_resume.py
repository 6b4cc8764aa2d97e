"""Trained through, or killed and resumed: the same to the bit, whatever the script trains with."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler as schedulers

from tests.checkpoints.script import SCHEDULES, train
from tests.checkpoints.test_staging import assert_equal
from tests.checkpoints.victims import run
from torchloom.checkpoints.api import Checkpoints


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_killed_and_resumed_is_trained_through_to_the_bit(tmp_path: Path, schedule: str) -> None:
    assert run(train, tmp_path / "through", schedule, 0, tmp_path / "through.pt") == 0
    for dies_at in (27, 39):
        assert run(train, tmp_path / "killed", schedule, dies_at, tmp_path / "killed.pt") == -signal.SIGKILL
    assert run(train, tmp_path / "killed", schedule, 0, tmp_path / "killed.pt") == 0
    through, killed = (torch.load(tmp_path / f"{name}.pt", weights_only=True) for name in ("through", "killed"))
    assert_equal(killed, through)


# ── whatever torch has ───────────────────────────────────────────────────────────────────────────────────────────────


def descend(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = sum((p - 1).square().sum() for p in model.parameters())
        assert isinstance(loss, torch.Tensor)
        loss.backward()
        return loss

    for _ in range(steps):
        optimizer.step(closure)


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd with momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "adam of tensors": lambda p: torch.optim.Adam(p, lr=torch.tensor(0.1), amsgrad=True),
    "adamw, two groups": lambda p: torch.optim.AdamW([{"params": [q], "lr": 0.1 * i} for i, q in enumerate(p)]),
    "adagrad": torch.optim.Adagrad,
    "adadelta": torch.optim.Adadelta,
    "adamax": torch.optim.Adamax,
    "asgd": torch.optim.ASGD,
    "nadam": torch.optim.NAdam,
    "radam": torch.optim.RAdam,
    "rmsprop": lambda p: torch.optim.RMSprop(p, centered=True, momentum=0.5),
    "rprop": torch.optim.Rprop,
    "lbfgs": torch.optim.LBFGS,
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_goes_on_where_it_was(tmp_path: Path, name: str) -> None:
    model, other = nn.Linear(3, 2), nn.Linear(3, 2)
    optimizer, another = OPTIMIZERS[name](model.parameters()), OPTIMIZERS[name](other.parameters())
    descend(model, optimizer, 3)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(3, {"model": model, "optimizer": optimizer})
        assert checkpoints.resume({"model": other, "optimizer": another}) == 3
    descend(model, optimizer, 2)
    descend(other, another, 2)
    assert_equal(other.state_dict(), model.state_dict())
    assert_equal(another.state_dict(), optimizer.state_dict())


MORE_SCHEDULES: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "lambda": lambda o: schedulers.LambdaLR(o, lambda step: 0.9**step),
    "multiplied": lambda o: schedulers.MultiplicativeLR(o, lambda _: 0.9),
    "constant": lambda o: schedulers.ConstantLR(o, total_iters=4),
    "linear": lambda o: schedulers.LinearLR(o, total_iters=6),
    "exponential": lambda o: schedulers.ExponentialLR(o, 0.9),
    "polynomial": lambda o: schedulers.PolynomialLR(o, total_iters=9),
    "cyclic": lambda o: schedulers.CyclicLR(o, 0.01, 0.1, step_size_up=3, mode="exp_range", gamma=0.9),
    "restarts": lambda o: schedulers.CosineAnnealingWarmRestarts(o, T_0=4),
    "one after another": lambda o: schedulers.SequentialLR(
        o, [schedulers.LinearLR(o, total_iters=3), schedulers.CosineAnnealingLR(o, 9)], milestones=[3]
    ),
    "chained": lambda o: schedulers.ChainedScheduler([schedulers.ExponentialLR(o, 0.9), schedulers.StepLR(o, 2)]),
    "averaging": lambda o: torch.optim.swa_utils.SWALR(o, swa_lr=0.05),
}


@pytest.mark.parametrize("name", MORE_SCHEDULES)
def test_every_schedule_goes_on_where_it_was(tmp_path: Path, name: str) -> None:
    def begin() -> tuple[torch.optim.Optimizer, Any]:
        optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1, momentum=0.9)
        return optimizer, MORE_SCHEDULES[name](optimizer)

    def rates(optimizer: torch.optim.Optimizer, schedule: Any, steps: int) -> list[float]:
        seen = []
        for _ in range(steps):
            optimizer.step()
            schedule.step()
            seen.append(optimizer.param_groups[0]["lr"])
        return seen

    optimizer, schedule = begin()
    rates(optimizer, schedule, 4)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(4, {"optimizer": optimizer, "schedule": schedule})
        another, again = begin()
        assert checkpoints.resume({"optimizer": another, "schedule": again}) == 4
    assert rates(another, again, 6) == rates(optimizer, schedule, 6)
