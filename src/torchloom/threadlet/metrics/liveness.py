"""What a rank shows of itself to the agent on its machine: its phase, and a page of memory that outlasts a hang.

step() writes the step into the page; the link thread ticks ten times a second while it gets the interpreter. Where no
such page can be created nothing is shown, and everything else works.

A phase is what the rank does other than training, as its script declares it with `with loom.phase("eval"):`. Time
inside a phase belongs to no step; inside "data" it counts as waiting for the next batch. Only phases of the training
thread count: what another thread does is no reason for training to stand still. Before the first step the phase is
"start", and from the goodbye on "leaving", whatever the script declares.
"""

from __future__ import annotations

import contextlib
import gc
import sys
import threading
from collections.abc import Iterator
from typing import Any

from torchloom.errors import BadInput
from torchloom.shared.liveness_page import COLLECTING, COLLECTIVES, PHASE, SHOWN, SIGNAL, STARTED, TICK, WANTED, Page
from torchloom.threadlet.metrics import stacks, wait_times
from torchloom.threadlet.metrics.meter import Meter

TICK_SECONDS = 0.1
OLDEST = 2
"""The generation whose collection may take long."""
START, LEAVING, DATA = "start", "leaving", "data"
_left: list[Page] = []
"""Pages of incarnations that have ended in this process: the next one uses the same page, which an agent may watch."""


def check_phase(name: str) -> None:
    if not isinstance(name, str) or not PHASE.fullmatch(name):
        raise BadInput(f"phase {name!r}", hint="1 to 32 letters, digits, - or _")


class LivenessPageWriter:
    def __init__(self, meter: Meter) -> None:
        self._meter = meter
        meter.on_start = self._show_phase
        self._phases: list[str] = []
        """Innermost last; changed by the training thread only."""
        self._leaving = False
        self._page: Page | None = None
        self._stacks: stacks.Stacks | None = None
        with contextlib.suppress(Exception):  # no memfd here, no descriptor left, no memory
            self._page = page = _left.pop() if _left else Page()
            while _left:  # a process with one rank has one page
                _left.pop().close()
            page.reset()
            meter.marks = page.marks
            self._show_phase()
            gc.callbacks.append(self._collecting)
            self._stacks = stacks.of_this_process()
            page.marks[SIGNAL] = 0 if self._stacks is None else self._stacks.signal

    @property
    def phase(self) -> str:
        """The current phase; empty while the rank trains."""
        if self._leaving:
            return LEAVING
        if not self._meter.marks[STARTED]:
            return START
        phases = self._phases
        return phases[-1] if phases else ""

    def _show_phase(self) -> None:
        page = self._page
        if page is not None:
            page.phase(self.phase)

    @contextlib.contextmanager
    def within(self, name: str) -> Iterator[None]:
        """Inside a phase of the training thread; on other threads it has no effect."""
        meter = self._meter
        if threading.get_ident() != meter.thread:
            yield
            return
        depth = len(self._phases)
        try:
            self._phases.append(name)
            self._show_phase()
            with meter.aside(meter.loading if name == DATA else meter.gaps):
                yield
        finally:
            del self._phases[depth:]
            self._show_phase()

    def leave(self) -> None:
        """The process is ending: it may save and clean up for as long as it needs."""
        self._leaving = True
        self._show_phase()

    def tick(self) -> None:
        """Show that the link thread runs. Never raises."""
        page = self._page
        if page is not None:
            with contextlib.suppress(Exception):
                page.marks[TICK] += 1
                page.marks[COLLECTIVES] = count_collectives() or 0
                page.marks[SIGNAL] = self._stacks.check_signal() if self._stacks is not None else 0
                wanted = page.marks[WANTED]
                if wanted > page.marks[SHOWN] and self._stacks is not None:  # the agent has asked for them
                    self._stacks.show()
                    page.marks[SHOWN] = wanted
        wait_times.follow(self._meter)

    def _collecting(self, moment: str, about: dict[str, Any]) -> None:
        """Called around each garbage collection: a long one looks like a held interpreter from outside."""
        page = self._page
        if page is not None and about["generation"] == OLDEST:
            page.marks[COLLECTING] = moment == "start"

    def end(self) -> None:
        """Stop writing; the page stays readable as it is."""
        self.leave()
        wait_times.unfollow(self._meter)
        self._drop()

    def disown(self) -> None:
        """In a forked child: the page is the parent's."""
        wait_times.forget()
        self._drop()
        while _left:
            with contextlib.suppress(Exception):
                _left.pop().close()
        stacks.forget()

    def _drop(self) -> None:
        page, self._page = self._page, None
        if page is not None:
            self._meter.marks = list(page.marks[:16])
            _left.append(page)
        with contextlib.suppress(ValueError):
            gc.callbacks.remove(self._collecting)


def count_collectives() -> int | None:
    """Collectives that this rank has started in the main process group; None without a group or a count.

    The rank that has started fewer than its peers is the one they wait for. The count is torch's own; reading it never
    blocks, even while another thread is inside a collective.
    """
    torch = sys.modules.get("torch.distributed.distributed_c10d")
    with contextlib.suppress(Exception):  # being imported or destroyed just now, or another torch
        if torch is not None and torch.is_initialized():
            return int(torch._get_default_group()._get_sequence_number_for_group())
    return None
