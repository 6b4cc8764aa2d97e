"""Phases: what a rank does other than training, as its script declares it with `with loom.phase("eval"):`.

Time inside a phase belongs to no step; inside "data" it counts as waiting for the next batch. Only phases of the
training thread count: what another thread does is no reason for training to stand still. Before the first step the
phase is "start", and from the goodbye on "leaving", whatever the script declares.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torchloom.errors import BadInput
from torchloom.threadlet.metrics.meter import Meter

START, LEAVING, DATA = "start", "leaving", "data"
_NAME = re.compile(r"[A-Za-z0-9_-]{1,32}")


def check_phase(name: str) -> str:
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise BadInput(f"phase {name!r}", hint="1 to 32 letters, digits, - or _")
    return name


class Phases:
    def __init__(self, meter: Meter) -> None:
        self.show: Callable[[str], None] = lambda _: None
        """Called at each change."""
        self._meter = meter
        self._inside: list[str] = []
        """Innermost last; changed by the training thread only."""
        self._left = False

    @property
    def now(self) -> str:
        if self._left:
            return LEAVING
        if not self._meter.started:
            return START
        inside = self._inside
        return inside[-1] if inside else ""

    def tell(self) -> None:
        """Show the phase again, because it may have changed."""
        self.show(self.now)

    @contextmanager
    def within(self, name: str) -> Iterator[None]:
        meter = self._meter
        if threading.get_ident() != meter.thread:
            yield
            return
        depth = len(self._inside)
        try:
            self._inside.append(name)
            self.tell()
            with meter.aside(meter.loading if name == DATA else meter.gaps):
                yield
        finally:
            del self._inside[depth:]
            self.tell()

    def leave(self) -> None:
        """The process is ending: it may save and clean up for as long as it needs."""
        self._left = True
        self.tell()
