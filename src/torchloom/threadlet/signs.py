"""The signs of life of a rank: a page of memory that whoever watches on this machine can read, come what may.

step() writes the step into it; the link thread ticks ten times a second, for as long as it gets the interpreter. Where
the machine allows no such page nothing is shown, and all else goes on.
"""

from __future__ import annotations

import contextlib
import gc
from typing import Any

from torchloom.page import COLLECTING, COLLECTIVES, SHOWN, SIGNAL, STARTED, STEP, TICK, WANTED, Page
from torchloom.threadlet import stacks, waiting
from torchloom.threadlet.collectives import begun
from torchloom.threadlet.meter import Meter
from torchloom.threadlet.phases import Phases

TICK_SECONDS = 0.1
OLDEST = 2
"""The generation whose collection may take long."""
_left: list[Page] = []
"""Of lives that have ended in this process: the next one shows itself on the same page, which may be watched."""


class Signs:
    def __init__(self, meter: Meter) -> None:
        self.phases = Phases(meter)
        self._meter = meter
        meter.on_start = self.phases.tell
        self._page: Page | None = None
        self._stacks: stacks.Stacks | None = None
        with contextlib.suppress(Exception):  # no memfd here, no descriptor left, no memory
            self._page = _take_page()
            self._show(self._page)

    def _show(self, page: Page) -> None:
        marks = page.marks
        for place in (STEP, STARTED, COLLECTING, COLLECTIVES):
            marks[place] = 0
        self.phases.show = page.phase
        self.phases.tell()
        self._meter.marks = marks
        gc.callbacks.append(self._collecting)
        self._stacks = stacks.of_this_process()
        if self._stacks is not None:
            marks[SIGNAL] = self._stacks.signal

    @property
    def collectives(self) -> int | None:
        return begun()

    def tick(self) -> None:
        """Still there. Never raises."""
        page = self._page
        if page is not None:
            with contextlib.suppress(Exception):
                page.marks[TICK] += 1
                page.marks[COLLECTIVES] = begun() or 0
                page.marks[SIGNAL] = self._stacks.check_signal() if self._stacks is not None else 0
                self._show_stacks(page)
        waiting.follow(self._meter)

    def _show_stacks(self, page: Page) -> None:
        """If someone wishes to see them."""
        wanted = page.marks[WANTED]
        if wanted > page.marks[SHOWN] and self._stacks is not None:
            self._stacks.show()
            page.marks[SHOWN] = wanted

    def _collecting(self, moment: str, about: dict[str, Any]) -> None:
        """Called around each collection of garbage: a long one looks like a lock from outside."""
        page = self._page
        if page is not None and about["generation"] == OLDEST:
            page.marks[COLLECTING] = moment == "start"

    def say_leaving(self) -> None:
        """What comes now is the end of the process: it may save and tidy up for as long as it needs."""
        self.phases.leave()

    def end(self) -> None:
        """Nothing is shown any more; the page stays as it is, to be read."""
        self.phases.leave()
        waiting.unfollow(self._meter)
        page = self._drop()
        if page is not None:
            _left.append(page)

    def disown(self) -> None:
        """In a forked child: the page is the parent's."""
        waiting.forget()
        page = self._drop()
        for mine in (page, *_left):
            if mine is not None:
                with contextlib.suppress(Exception):
                    mine.close()
        _left.clear()
        stacks.forget()

    def _drop(self) -> Page | None:
        page, self._page = self._page, None
        self._meter.marks = [0] * len(self._meter.marks) if page is None else list(page.marks[:16])
        self.phases.show = lambda _: None
        with contextlib.suppress(ValueError):
            gc.callbacks.remove(self._collecting)
        return page


def _take_page() -> Page:
    """One that a life before has left, else a new one. A process that plays one rank at a time has one page."""
    page = _left.pop() if _left else Page()
    while _left:
        _left.pop().close()
    return page
