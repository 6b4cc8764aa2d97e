"""Writes the liveness page of a rank: memory that the agent on this machine can read even when the rank hangs.

step() writes the step into it; the link thread ticks ten times a second while it gets the interpreter. Where no such
page can be created nothing is shown, and everything else works.
"""

from __future__ import annotations

import contextlib
import gc
import sys
from typing import Any

from torchloom.shared.liveness_page import COLLECTING, COLLECTIVES, SHOWN, SIGNAL, STARTED, STEP, TICK, WANTED, Page
from torchloom.threadlet.metrics import stacks, wait_times
from torchloom.threadlet.metrics.meter import Meter
from torchloom.threadlet.metrics.phases import Phases

TICK_SECONDS = 0.1
OLDEST = 2
"""The generation whose collection may take long."""
_left: list[Page] = []
"""Pages of incarnations that have ended in this process: the next one uses the same page, which an agent may watch."""


class LivenessPageWriter:
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

    def tick(self) -> None:
        """Show that the link thread runs. Never raises."""
        page = self._page
        if page is not None:
            with contextlib.suppress(Exception):
                page.marks[TICK] += 1
                page.marks[COLLECTIVES] = count_collectives() or 0
                page.marks[SIGNAL] = self._stacks.check_signal() if self._stacks is not None else 0
                self._show_stacks(page)
        wait_times.follow(self._meter)

    def _show_stacks(self, page: Page) -> None:
        """Write the stacks if the agent has asked for them."""
        wanted = page.marks[WANTED]
        if wanted > page.marks[SHOWN] and self._stacks is not None:
            self._stacks.show()
            page.marks[SHOWN] = wanted

    def _collecting(self, moment: str, about: dict[str, Any]) -> None:
        """Called around each garbage collection: a long one looks like a held interpreter from outside."""
        page = self._page
        if page is not None and about["generation"] == OLDEST:
            page.marks[COLLECTING] = moment == "start"

    def end(self) -> None:
        """Stop writing; the page stays readable as it is."""
        self.phases.leave()
        wait_times.unfollow(self._meter)
        page = self._drop()
        if page is not None:
            _left.append(page)

    def disown(self) -> None:
        """In a forked child: the page is the parent's."""
        wait_times.forget()
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
    """The page of an earlier incarnation in this process, or a new one. A process with one rank has one page."""
    page = _left.pop() if _left else Page()
    while _left:
        _left.pop().close()
    return page


def count_collectives() -> int | None:
    """Collectives that this rank has started in the main process group; None without a group or a count.

    The rank that has started fewer than its peers is the one they wait for. The count is torch's own; reading it never
    blocks, even while another thread is inside a collective.
    """
    torch = sys.modules.get("torch.distributed.distributed_c10d")
    try:
        if torch is None or not torch.is_initialized():
            return None
        return int(torch._get_default_group()._get_sequence_number_for_group())
    except Exception:  # noqa: BLE001  being imported or destroyed just now, or another torch
        return None
