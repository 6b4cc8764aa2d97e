"""Ranks whose script never calls attach(): `loom run` counts their optimizer steps and reports those.

Importing this module is cheap: ranks import it before their script starts.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING

from torchloom.threadlet.process import step_counter

if TYPE_CHECKING:
    from torchloom.threadlet.threadlet import Threadlet


def install() -> None:
    """Count the steps of this process, which is a rank, unless its script attaches."""
    step_counter.install(lambda: attach_counted(os.environ))


class CountedSteps:
    """Reports the steps of a script that has not attached, and what it saves; offers nothing to be changed."""

    def __init__(self, threadlet: Threadlet, resumed: int) -> None:
        self._resumed = resumed
        self._threadlet = threadlet

    def step(self) -> None:
        self._threadlet.step()

    def skip(self, steps: int) -> None:
        meter = self._threadlet._meter
        if meter is not None:
            meter.resume_at(self._resumed + steps)
            meter.start(threading.main_thread().ident or 0)  # probably; the next step corrects it


def attach_counted(environ: Mapping[str, str]) -> CountedSteps:
    """A threadlet for a script that has not attached itself. Prints nothing and never blocks."""
    from torchloom.checkpoints import threadlet_bridge
    from torchloom.threadlet.process.identity import Host, find_names
    from torchloom.threadlet.threadlet import read_settings, start_threadlet

    names = find_names(environ, Host(socket.gethostname(), os.getpid(), ""))
    threadlet = start_threadlet(names, read_settings(environ), None, counted=True)
    if threadlet._link is not None:
        threadlet_bridge.register_threadlet(threadlet)
    resumed = environ.get("TORCHLOOM_RESUME_STEP", "")
    return CountedSteps(threadlet, int(resumed) if resumed.isdecimal() else 0)
