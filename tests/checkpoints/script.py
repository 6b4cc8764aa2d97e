"""A training script with everything that has a state, to be killed and started again."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim import lr_scheduler as schedulers

from torchloom.checkpoints.api import Checkpoints

STEPS = 40
SCHEDULES: dict[str, Callable[[torch.optim.Optimizer], schedulers.LRScheduler]] = {
    "cosine": lambda o: schedulers.CosineAnnealingLR(o, T_max=STEPS),
    "one cycle": lambda o: schedulers.OneCycleLR(o, max_lr=0.05, total_steps=STEPS + 1),
    "milestones": lambda o: schedulers.MultiStepLR(o, [10, 20, 26, 30]),
}


class Sampler:
    """Shuffles again each epoch, with its own random numbers."""

    def __init__(self, size: int) -> None:
        self.generator = torch.Generator().manual_seed(5)
        self.size = size
        self.order: list[int] = []

    def take(self) -> int:
        if not self.order:
            self.order = torch.randperm(self.size, generator=self.generator).tolist()
        return self.order.pop()

    def state_dict(self) -> dict[str, Any]:
        return {"chance": self.generator.get_state(), "order": self.order}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.generator.set_state(state["chance"])
        self.order = list(state["order"])


class Scaler:
    """As GradScaler is, without a GPU."""

    def __init__(self) -> None:
        self.scale, self.good = 1024.0, 0

    def update(self) -> None:
        self.good += 1
        if self.good == 7:
            self.scale, self.good = self.scale * 2, 0

    def state_dict(self) -> dict[str, Any]:
        return {"scale": self.scale, "good": self.good}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.scale, self.good = state["scale"], state["good"]


def train(folder: Path, schedule: str, dies_at: int, out: Path) -> None:
    """A training script that resumes; it is killed after `dies_at` steps, or writes its state at its end."""
    torch.set_num_threads(1)
    torch.manual_seed(1)
    random.seed(2)
    np.random.seed(3)
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    state = {
        "model": model,
        "optimizer": optimizer,
        "scheduler": SCHEDULES[schedule](optimizer),
        "sampler": Sampler(11),
        "scaler": Scaler(),
    }
    data = torch.randn(11, 4, 8, generator=torch.Generator().manual_seed(9))
    checkpoints = Checkpoints(folder, every=5, keep=2)
    step = checkpoints.resume(state)
    while step < STEPS:
        noise = random.random() + np.random.rand() + torch.rand(())
        loss = (model(data[state["sampler"].take()]) + noise).square().mean()
        optimizer.zero_grad()
        (loss * state["scaler"].scale).backward()
        for parameter in model.parameters():
            parameter.grad /= state["scaler"].scale
        optimizer.step()
        state["scheduler"].step()
        state["scaler"].update()
        step += 1
        checkpoints.save(step, state)
        if step == dies_at:
            os.kill(os.getpid(), signal.SIGKILL)
    checkpoints.close()
    drawn = (random.random(), np.random.rand(3).tolist(), np.random.randn(), random.gauss(0, 1), torch.rand(3))
    torch.save({"parts": {name: part.state_dict() for name, part in state.items()}, "drawn": drawn}, out)
