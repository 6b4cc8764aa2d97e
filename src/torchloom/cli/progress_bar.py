"""A line on the terminal that says how far a long work is, and is gone when it is done."""

from __future__ import annotations

import shutil
import sys
import time
from types import TracebackType
from typing import Self

_PAUSE = 0.1
"""Seconds between two writings; a terminal at the end of a slow line is not flooded."""


class Progress:
    """Written to stderr if that is a terminal; otherwise nothing is."""

    def __init__(self) -> None:
        self._shown = sys.stderr.isatty()
        self._written = False
        self._began = time.monotonic()
        self._last = self._began - _PAUSE

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._written:
            self._write("")

    def say(self, text: str, done: int) -> None:
        """What is being done, and how many bytes have been so far."""
        from torchloom.views.format.numbers import size
        from torchloom.views.format.tables import clean, cut

        now = time.monotonic()
        if not self._shown or now - self._last < _PAUSE:
            return
        self._last = now
        if done:
            text += f", {size(round(done / max(now - self._began, 1e-6)))}/s"
        self._write(cut(clean(text), shutil.get_terminal_size().columns - 1))

    def _write(self, text: str) -> None:
        self._written = True
        sys.stderr.write(f"\r\x1b[K{text}")
        sys.stderr.flush()
