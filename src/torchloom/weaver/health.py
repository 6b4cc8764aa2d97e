"""How the weaver itself fares: its clock, what it refused, what troubles it."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable

import nats.errors
import nats.js.errors

from torchloom.errors import TorchLoomError

log = logging.getLogger("torchloom.weaver")

SAY_SECONDS = 10.0
"""Between two log lines about the same kind of refusal."""


class Clock:
    """Wall time that never jumps: read once, then carried on by the monotonic clock."""

    def __init__(self) -> None:
        self._offset = time.time() - time.monotonic()

    def __call__(self) -> float:
        return time.monotonic() + self._offset


class Health:
    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.refused: Counter[str] = Counter()
        self.trouble = ""
        self._said: dict[str, float] = {}

    def refuse(self, why: str) -> None:
        """Count what is not accepted, and say it, but not a thousand times."""
        kind = why[:100]
        if len(self.refused) >= 100 and kind not in self.refused:
            kind = "other"
        self.refused[kind] += 1
        now = self._clock()
        if now - self._said.get(kind, 0.0) > SAY_SECONDS:
            self._said[kind] = now
            log.warning("refused (%d so far): %s", self.refused[kind], why)

    def complain(self, trouble: str) -> None:
        if trouble != self.trouble:
            log.warning("%s", trouble or f"mended: {self.trouble}")
        self.trouble = trouble


async def quietly(work: Callable[[], Awaitable[None]]) -> None:
    """For what may fail and is tried again by itself: never the weaver's end."""
    try:
        await work()
    except (nats.errors.Error, nats.js.errors.Error, TorchLoomError, OSError) as error:
        log.warning("%s: %s", work.__name__.strip("_"), error or type(error).__name__)
