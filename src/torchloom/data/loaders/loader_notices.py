"""Warnings about loaders that have ended: the words that the training process shows."""

from __future__ import annotations

import os
import signal
import sys
import warnings
from pathlib import Path

from torchloom.data.loaders.pool import Died, ZygoteDied

NOTICED_DEATHS = 4
"""Deaths of loader processes after which a warning is given only at powers of two."""
_PACKAGE = str(Path(__file__).parents[2])


def warn_caller(notice: Warning) -> None:
    """The line that is named is the one that takes batches, outside of torchLoom."""
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        level, frame = level + 1, frame.f_back
    warnings.warn(notice, stacklevel=level)


def notices_of_death(event: Died, deaths: int) -> list[Warning]:
    """Of the first deaths, and then of fewer and fewer of them. `deaths`: of this loader so far."""
    if deaths > NOTICED_DEATHS and deaths.bit_count() > 1:
        return []
    end = "has ended" if event.exit is None else _describe(event.exit.status)
    process = f" (process {event.exit.pid})" if event.exit is not None else ""
    if event.exit is not None and event.exit.pid == 0:
        end, process = f"could not be started ({os.strerror(event.exit.status)})", ""
    lost = f"{deaths} {'process' if deaths == 1 else 'processes'}"
    text = f"loader {event.loader}{process} {end}; its batches are loaded again. This loader has lost {lost}"
    return [RuntimeWarning(text)]


def notice_of_zygote(event: ZygoteDied, is_broken: bool) -> Warning:
    consequence = "its loaders end with it, and others are started"
    if is_broken:
        consequence = "no more can be started in this epoch, and the training process loads its batches itself"
    end = _describe(event.status)
    return RuntimeWarning(f"the process from which loader processes are started {end}: {consequence}")


def _describe(status: int | None) -> str:
    if status is None:
        return "has ended"
    if status >= 0:
        return f"has ended with exit code {status}"
    try:
        return f"was killed by {signal.Signals(-status).name}"
    except ValueError:
        return f"was killed by signal {-status}"
