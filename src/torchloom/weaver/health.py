"""The state of the weaver itself: its clock, what it refused, what is wrong."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

import nats.errors

from torchloom.errors import TorchLoomError
from torchloom.protocol.phrase import Prose, phrase
from torchloom.protocol.views import Trouble
from torchloom.views.wording.phrases import render

log = logging.getLogger("torchloom.weaver")

SAY_SECONDS = 10.0
"""Seconds between two log lines about the same kind of refusal."""
MOST_REASONS = 100
"""Most reasons that are counted separately."""


class Clock:
    """Wall time that never jumps: read once, then continued by the monotonic clock."""

    def __init__(self) -> None:
        self._offset = time.time() - time.monotonic()

    def __call__(self) -> float:
        return time.monotonic() + self._offset


@dataclass
class Refusals:
    """Messages that were not accepted, all for the same reason."""

    why: Prose
    count: int = 0
    logged: float = 0.0


class Health:
    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self._refusals: dict[str, Refusals] = {}
        self.troubles: dict[Trouble, Prose] = {}

    def refuse(self, why: Prose) -> None:
        """Count what is not accepted, and log it now and then."""
        reason = why if len(self._refusals) < MOST_REASONS or str(why) in self._refusals else phrase("other_refusals")
        refusals = self._refusals.setdefault(str(reason), Refusals(reason))
        refusals.count += 1
        now = self.clock()
        if now - refusals.logged > SAY_SECONDS:
            refusals.logged = now
            log.warning("refused (%d so far): %s", refusals.count, render(why))

    @property
    def refused(self) -> dict[str, int]:
        """How many messages were refused, by reason."""
        counts = Counter[str]()
        for refusals in self._refusals.values():
            counts[render(refusals.why)[:100]] += refusals.count
        return dict(counts)

    def complain(self, trouble: Trouble, text: Prose) -> None:
        if text != self.troubles.get(trouble, ""):
            log.warning("%s", render(text))
        self.troubles[trouble] = text

    def is_mended(self, trouble: Trouble) -> None:
        if text := self.troubles.pop(trouble, ""):
            log.warning("mended: %s", render(text))


def first_trouble(troubles: Mapping[Trouble, Prose]) -> Prose:
    return next(iter(troubles.values()), "")


async def quietly(work: Callable[[], Awaitable[None]]) -> None:
    """For periodic work: its failure is logged, and does not end the weaver."""
    try:
        await work()
    except (nats.errors.Error, TorchLoomError, OSError) as error:
        log.warning("%s: %s", work.__name__.strip("_"), error or type(error).__name__)
