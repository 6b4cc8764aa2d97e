"""NVIDIA's management library (NVML), started and stopped."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pynvml

ERRORS = (pynvml.NVMLError, OSError)
"""What a call of NVML may raise; where there is no driver, the start raises."""


@contextlib.contextmanager
def nvml() -> Iterator[None]:
    """NVML can be used within this block. Raises one of `ERRORS` if it cannot be started."""
    pynvml.nvmlInit()
    try:
        yield
    finally:
        with contextlib.suppress(*ERRORS):
            pynvml.nvmlShutdown()
