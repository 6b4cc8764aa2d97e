"""A training process of its own, looked at from outside: its lines and its page. No control plane is there."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from torchloom.shared.liveness_page import View, view

T = TypeVar("T")
ATTACHED = """
import ctypes, gc, os, sys, threading, time, torchloom
loom = torchloom.attach("job", "hi")
"""


def seen(look: Callable[[], T | None], what: str, seconds: float = 60.0) -> T:
    """What `look` finds, as soon as it finds something."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        found = look()
        if found:
            return found
        time.sleep(0.01)
    raise AssertionError(f"{what} was not seen within {seconds} s")


class Outside:
    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process

    @property
    def pid(self) -> int:
        return self.process.pid

    def line(self) -> str:
        """The next that it prints; all it said if it has ended instead."""
        assert self.process.stdout
        assert self.process.stderr
        line = self.process.stdout.readline().strip()
        assert line, self.process.stderr.read()
        return line

    def tell(self) -> None:
        assert self.process.stdin
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def page(self) -> View:
        return seen(lambda: view(self.pid), "the page")


@contextmanager
def running(script: str, folder: Path, **env: str) -> Iterator[Outside]:
    environ = os.environ | {"TORCHLOOM_STATE": str(folder / "nobody"), "TORCHLOOM_GOODBYE_SECONDS": "0.3"} | env
    command = [sys.executable, "-c", script]
    process = subprocess.Popen(command, stdin=-1, stdout=-1, stderr=-1, text=True, env=environ)
    try:
        yield Outside(process)
    finally:
        if process.returncode is None:
            process.kill()
            process.communicate()
