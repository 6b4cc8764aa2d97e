"""Ranks whose script never calls attach(): `loom run` counts their optimizer steps and reports those.

Importing this module is cheap: ranks import it before their script starts.
"""

from __future__ import annotations

import os

from torchloom.threadlet.process import step_counter


def install() -> None:
    """Count the steps of this process, which is a rank, unless its script attaches."""
    step_counter.install(_attach)


def _attach() -> step_counter.StepSink:
    from torchloom.threadlet.threadlet import attach_counted

    return attach_counted(os.environ)
