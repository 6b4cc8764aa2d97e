"""Converts values given to step() to numbers, on another thread because reading a tensor may block on a device.

A device that hangs would otherwise stop the beats just when they should show that the rank is alive and makes no step.
A beat waits briefly for the readings; if they do not come, it carries the last ones.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torchloom.threadlet.metrics.meter import LOSS

_PLAIN = (float, int, bool)
Reading = tuple[str, Any, float | None, str]
"""(name, the value as given, its number if it has one, why not)"""
Result = list[Reading] | tuple[int, int] | None
"""A result of that thread: values as numbers, or the steps at which the loss stopped being finite."""


@dataclass
class Readings:
    """The latest loss and metrics as numbers. Each value given to step() is read once."""

    seen: dict[str, Any] = field(default_factory=dict)
    numbers: dict[str, float] = field(default_factory=dict)
    not_finite: set[str] = field(default_factory=set)
    dropped: int = 0
    complaint: str = ""
    bad_steps: tuple[int, int] | None = None
    """The steps between which the loss stopped being finite, while it is not."""

    def unread(self, values: Mapping[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in values.items() if self.seen.get(name, self) is not value}

    def learn(self, judged: Iterable[Reading]) -> None:
        for name, value, number, why in judged:
            self.seen[name] = value
            self.numbers.pop(name, None)
            self.not_finite.discard(name)
            if number is None:
                self.dropped += 1
                self.complaint = f"{name}: {why}"
            elif math.isfinite(number):
                self.numbers[name] = number
            else:
                self.not_finite.add(name)

    @property
    def loss(self) -> float | None:
        return self.numbers.get(LOSS)

    @property
    def metrics(self) -> dict[str, float]:
        return {name: number for name, number in self.numbers.items() if name != LOSS}


def find_bad_steps(losses: Sequence[tuple[int, Any]]) -> tuple[int, int] | None:
    """The first step whose loss is not finite, after the last one whose loss is, among (step, loss) in order."""
    since = 0
    for step, loss in losses:
        number, _ = reading(loss)
        if number is not None and not math.isfinite(number):
            return (min(since, step) or step, step)
        since = step + 1
    return None


def judge(values: Mapping[str, Any]) -> list[Reading]:
    return [(name, value, *reading(value)) for name, value in values.items()]


def reading(value: Any) -> tuple[float | None, str]:
    """The value as a number, or None and the reason."""
    try:
        if _is_foreign_tensor(value):
            return None, f"a {type(value).__name__} may need its peers to be read; pass a plain number"
        item = getattr(value, "item", None)
        number = value if item is None else item()  # of tensors and arrays with one element
        if isinstance(number, (str, bytes, bytearray)):
            return None, "a text is not a number"
        return float(number), ""
    except Exception as error:  # noqa: BLE001  anything may have been passed to step()
        return None, f"{type(error).__name__} on reading a {type(value).__name__}"


def _is_foreign_tensor(value: Any) -> bool:
    """Whether it is a subclass of torch.Tensor: reading a DTensor runs a collective, which must not happen here."""
    torch = sys.modules.get("torch")
    tensor = getattr(torch, "Tensor", None)
    return tensor is not None and isinstance(value, tensor) and type(value) is not tensor


class Reader:
    """Keeps the readings up to date."""

    def __init__(self) -> None:
        self.readings = Readings()
        self._awaited: asyncio.Future[Result] | None = None

    async def refresh(self, values: Mapping[str, Any], seconds: float, losses: Sequence[tuple[int, Any]] = ()) -> None:
        """Read new values. What takes longer than `seconds` is left for a later beat."""
        if await self._collect(seconds):  # otherwise it still waits for a device
            unread = self.readings.unread(values)
            slow = {name: value for name, value in unread.items() if type(value) not in _PLAIN}
            self.readings.learn(judge({name: value for name, value in unread.items() if name not in slow}))
            if slow:
                await self._read(judge, slow, seconds)
        if LOSS not in self.readings.not_finite:
            self.readings.bad_steps = None
        elif self.readings.bad_steps is None and self._awaited is None:
            await self._read(find_bad_steps, losses, seconds)

    async def _read(self, read: Callable[[Any], Result], values: object, seconds: float) -> None:
        with contextlib.suppress(RuntimeError):  # no thread can be started: left for a later beat
            self._awaited = asyncio.get_running_loop().run_in_executor(None, read, values)
        await self._collect(seconds)

    async def _collect(self, seconds: float) -> bool:
        """Take over what was read; True if nothing is outstanding."""
        if self._awaited is None:
            return True
        await asyncio.wait([self._awaited], timeout=seconds)
        if not self._awaited.done():
            return False
        awaited, self._awaited = self._awaited, None
        result = awaited.result()
        if isinstance(result, list):
            self.readings.learn(result)
        else:
            self.readings.bad_steps = result
        return True
