"""One save on its way to the disk: how far it is, and what became of it."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path


class Saving:
    """A checkpoint that is being written behind the training."""

    def __init__(self, step: int, path: Path, began: float) -> None:
        self.step = step
        self.path = path
        """Where it will be."""
        self.began = began
        """On the monotonic clock, when the copy out began."""
        self.stall = 0.0
        """Seconds training stood still for it."""
        self.total = 0
        """Bytes to write, by this process."""
        self.written = 0
        self.seconds = 0.0
        """Until it was durable."""
        self.error = ""
        """Why it failed; empty if it did not."""
        self._done = threading.Event()
        self._pid = os.getpid()

    def grow(self, size: int) -> None:
        self.written += size

    def end(self, error: str = "") -> None:
        self.error = error
        self.seconds = time.monotonic() - self.began
        self._done.set()

    @property
    def done(self) -> bool:
        return self._done.is_set()

    @property
    def progress(self) -> float:
        """From 0 to 1; what is not data makes the last bit of it."""
        if self.done:
            return 1.0
        return min(0.99, self.written / self.total) if self.total else 0.0

    def wait(self, seconds: float | None = None) -> bool:
        """Whether it is over, waiting for that at most so long. A forked child, which never hears, does not wait."""
        return self._done.wait(seconds) if self._pid == os.getpid() else self.done

    def __repr__(self) -> str:
        how = f"failed: {self.error}" if self.error else "done" if self.done else f"{self.progress:.0%}"
        return f"<Saving {self.path.name} {how}>"
