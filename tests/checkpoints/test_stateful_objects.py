"""A checkpoint that does not fit what it is loaded into changes nothing in it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.checkpoints.test_staging import assert_equal
from torchloom.checkpoints.api import Checkpoints
from torchloom.errors import BadState


def network(width: int = 8, layers: int = 2) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))


def trained(model: nn.Module) -> dict[str, Any]:
    """Model, optimizer, scheduler after three steps."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    for _ in range(3):
        optimizer.zero_grad()
        sum(p.square().sum() for p in model.parameters()).backward()
        optimizer.step()
        scheduler.step()
    return {"model": model, "optimizer": optimizer, "scheduler": scheduler}


class Sampler:
    """A part of the script's own, which may refuse."""

    def __init__(self, at: int = 0, refuses: bool = False) -> None:
        self.at = at
        self.refuses = refuses

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]
        if self.refuses and self.at != 0:
            raise RuntimeError("made for another data set")


def snapshot(state: dict[str, Any]) -> Any:
    return copy.deepcopy(
        {name: part.state_dict() if hasattr(part, "state_dict") else part for name, part in state.items()}
    )


@pytest.fixture
def saved(tmp_path: Path) -> Checkpoints:
    """Of a small network that was trained, a sampler, and some plain values."""
    with Checkpoints(tmp_path) as checkpoints:
        state = {**trained(network()), "sampler": Sampler(7), "epoch": 5, "mean": torch.full((4,), 3.0)}
        checkpoints.save(10, state)
    return checkpoints


def fresh(**parts: Any) -> dict[str, Any]:
    plain = {"epoch": 0, "mean": torch.zeros(4), "sampler": Sampler()}
    return {**trained(network()), **plain, **parts}


def without(name: str) -> dict[str, Any]:
    state = fresh()
    del state[name]
    return state


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: fresh(**trained(network(width=9))), r"model\..* has shape \(8, 8\) there and \(9, 9\) here"),
        (lambda: fresh(**trained(network(layers=3))), "2.bias is missing"),
        (lambda: fresh(**trained(network(layers=1))), "1.bias is not in this model"),
        (lambda: fresh(optimizer=torch.optim.SGD(network(layers=1).parameters(), lr=1.0)), "other parameter groups"),
        (lambda: fresh(another=Sampler(1)), "it has no another"),
        (lambda: without("sampler"), "nothing was given for sampler"),
        (lambda: fresh(mean=torch.zeros(5)), "mean was saved with another shape"),
        (lambda: fresh(sampler=Sampler(0, refuses=True)), "sampler does not take what was saved: made for another"),
        (lambda: fresh(model=Sampler(), sampler=network()), "sampler is another model"),
    ],
)
def test_what_does_not_fit_is_told_and_nothing_is_changed(
    saved: Checkpoints, make: Callable[[], dict[str, Any]], why: str
) -> None:
    state = make()
    before, chance = snapshot(state), torch.get_rng_state()
    with pytest.raises(BadState, match=why):
        saved.resume(state)
    assert_equal(snapshot(state), before)
    assert torch.equal(torch.get_rng_state(), chance)
    saved.close()


@pytest.mark.parametrize(
    "make",
    [
        lambda: fresh(**trained(network(width=9))),
        lambda: fresh(optimizer=torch.optim.SGD(network(layers=1).parameters(), lr=1.0)),
        lambda: fresh(mean=torch.zeros(5)),
        lambda: fresh(sampler=Sampler(0, refuses=True)),
    ],
)
def test_what_cannot_fit_is_refused_even_if_not_strict(saved: Checkpoints, make: Callable[[], dict[str, Any]]) -> None:
    state = make()
    before = snapshot(state)
    with pytest.raises(BadState):
        saved.resume(state, strict=False)
    assert_equal(snapshot(state), before)
    saved.close()


def test_not_strict_takes_what_there_is(saved: Checkpoints) -> None:
    larger = network(layers=3)
    last = copy.deepcopy(larger[2].state_dict())
    state = {"model": larger, "another": Sampler(1), "epoch": 0}
    assert saved.resume(state, strict=False) == 10
    loaded = saved.load().state
    assert_equal({name: larger.state_dict()[name] for name in loaded["model"]}, dict(loaded["model"]))
    assert_equal(larger[2].state_dict(), last)
    assert (state["another"].at, state["epoch"]) == (1, 5)
    saved.close()


def test_plain_values_and_tensors_are_given_back_as_well(saved: Checkpoints) -> None:
    state = fresh()
    mean = state["mean"]
    assert saved.resume(state) == 10
    assert (state["epoch"], state["sampler"].at) == (5, 7)
    assert state["mean"] is mean
    assert torch.equal(mean, torch.full((4,), 3.0))
    saved.close()


def test_an_empty_folder_resumes_nothing_and_changes_nothing(tmp_path: Path) -> None:
    state = fresh()
    before = snapshot(state)
    with Checkpoints(tmp_path / "none" / "yet") as checkpoints:
        assert checkpoints.resume(state) == 0
    assert_equal(snapshot(state), before)
