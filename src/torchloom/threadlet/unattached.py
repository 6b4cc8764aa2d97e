"""Ranks whose script never calls attach(): `loom run` counts their optimizer steps and reports those.

Importing this module is cheap: ranks import it before their script starts.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from typing import TYPE_CHECKING

from torchloom.threadlet.process import step_counter

if TYPE_CHECKING:
    from torchloom.threadlet.threadlet import Threadlet


def install() -> None:
    """Count the steps of this process, which is a rank, unless its script attaches."""
    step_counter.install(lambda: attach_counted(os.environ))


def attach_counted(environ: Mapping[str, str]) -> Threadlet:
    """A threadlet for a script that has not attached itself. Prints nothing and never blocks."""
    from torchloom.threadlet.metrics.batches import resumed_step
    from torchloom.threadlet.process.identity import Host, find_names
    from torchloom.threadlet.threadlet import read_settings, start_threadlet

    names = find_names(environ, Host(socket.gethostname(), os.getpid(), ""))
    threadlet = start_threadlet(names, read_settings(environ), None, counted=True)
    if threadlet._meter is not None:
        threadlet._meter.resume_at(resumed_step(environ))
    return threadlet
