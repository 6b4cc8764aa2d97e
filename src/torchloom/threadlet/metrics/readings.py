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
from typing import Any

from torchloom.threadlet.metrics.meter import LOSS

_PLAIN = (float, int, bool)
Reading = tuple[str, Any, float | None, str]
"""(name, the value as given, its number if it has one, why not)"""
Result = list[Reading] | tuple[int, int] | None
"""A result of that thread: values as numbers, or the steps at which the loss stopped being finite."""


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
        tensor = getattr(sys.modules.get("torch"), "Tensor", None)
        if tensor is not None and isinstance(value, tensor) and type(value) is not tensor:
            # Reading a subclass of Tensor, such as a DTensor, may run a collective, which must not happen here.
            return None, f"a {type(value).__name__} may need its peers to be read; pass a plain number"
        item = getattr(value, "item", None)
        number = value if item is None else item()  # of tensors and arrays with one element
        if isinstance(number, (str, bytes, bytearray)):
            return None, "a text is not a number"
        return float(number), ""
    except Exception as error:  # noqa: BLE001  anything may have been passed to step()
        return None, f"{type(error).__name__} on reading a {type(value).__name__}"


class Reader:
    """The latest loss and metrics as numbers. Each value given to step() is read once."""

    def __init__(self) -> None:
        self.not_finite: set[str] = set()
        self.dropped = 0
        self.complaint = ""
        self.bad_steps: tuple[int, int] | None = None
        """The steps between which the loss stopped being finite, while it is not."""
        self._seen: dict[str, Any] = {}
        self._numbers: dict[str, float] = {}
        self._awaited: asyncio.Future[Result] | None = None

    @property
    def loss(self) -> float | None:
        return self._numbers.get(LOSS)

    @property
    def metrics(self) -> dict[str, float]:
        return {name: number for name, number in self._numbers.items() if name != LOSS}

    async def refresh(self, values: Mapping[str, Any], seconds: float, losses: Sequence[tuple[int, Any]] = ()) -> None:
        """Read new values. What takes longer than `seconds` is left for a later beat."""
        if await self._collect(seconds):  # otherwise it still waits for a device
            unread = {name: value for name, value in values.items() if self._seen.get(name, self) is not value}
            slow = {name: value for name, value in unread.items() if type(value) not in _PLAIN}
            self.learn(judge({name: value for name, value in unread.items() if name not in slow}))
            if slow:
                await self._read(judge, slow, seconds)
        if LOSS not in self.not_finite:
            self.bad_steps = None
        elif self.bad_steps is None and self._awaited is None:
            await self._read(find_bad_steps, losses, seconds)

    async def _read(self, read: Callable[[Any], Result], values: object, seconds: float) -> None:
        with contextlib.suppress(RuntimeError):  # no thread can be started: left for a later beat
            self._awaited = asyncio.get_running_loop().run_in_executor(None, read, values)
        await self._collect(seconds)

    async def _collect(self, seconds: float) -> bool:
        """Take over what was read; True if nothing is outstanding."""
        if self._awaited is not None:
            await asyncio.wait([self._awaited], timeout=seconds)
            if not self._awaited.done():
                return False
            awaited, self._awaited = self._awaited, None
            result = awaited.result()
            if isinstance(result, list):
                self.learn(result)
            else:
                self.bad_steps = result
        return True

    def learn(self, judged: Iterable[Reading]) -> None:
        for name, value, number, why in judged:
            self._seen[name] = value
            self._numbers.pop(name, None)
            self.not_finite.discard(name)
            if number is None:
                self.dropped += 1
                self.complaint = f"{name}: {why}"
            elif math.isfinite(number):
                self._numbers[name] = number
            else:
                self.not_finite.add(name)
