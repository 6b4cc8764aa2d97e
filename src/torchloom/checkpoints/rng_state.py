"""The state of a process's random number generators, so that a resumed run draws the same numbers."""

from __future__ import annotations

import random
import sys
from collections.abc import Mapping
from typing import Any

import torch


def capture() -> dict[str, Any]:
    """The states of the generators of Python, torch, numpy and the devices, if they are in use."""
    version, words, gauss = random.getstate()
    states: dict[str, Any] = {"python": (version, torch.tensor(words), gauss), "torch": torch.get_rng_state()}
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        name, keys, *rest = numpy.random.get_state()
        states["numpy"] = (
            str(name),
            torch.from_numpy(keys.copy()),
            *(part.item() if hasattr(part, "item") else part for part in rest),
        )
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states["cuda"] = torch.cuda.get_rng_state_all()
    return states


def restore(states: Mapping[str, Any]) -> None:
    if "python" in states:
        version, keys, gauss = states["python"]
        random.setstate((version, tuple(keys.tolist()), gauss))
    if "torch" in states:
        torch.set_rng_state(states["torch"])
    if "numpy" in states:
        import numpy

        name, keys, *rest = states["numpy"]
        numpy.random.set_state((name, keys.numpy(), *rest))
    if "cuda" in states and torch.cuda.is_available():
        for device, state in zip(range(torch.cuda.device_count()), states["cuda"], strict=False):
            torch.cuda.set_rng_state(state, device)
