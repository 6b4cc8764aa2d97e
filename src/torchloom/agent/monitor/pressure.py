"""Load, memory and pressure of the machine, as its kernel reports them.

Nothing here fails: what a kernel does not report is left out.
"""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path

import psutil

from torchloom.agent.monitor.exit_evidence import oom_kills
from torchloom.protocol.node import Pressure
from torchloom.protocol.phrase import Phrase, phrase

PRESSURE = Path("/proc/pressure")
_WHO = {"cpu": "some", "memory": "full", "io": "full"}
"""A busy machine always lets some wait for memory or a disk; for a processor there is no moment in which all do."""
_GB = 1024**3


def read_pressure(folder: Path = PRESSURE) -> Pressure | None:
    """The kernel's own averages over ten seconds; None where it keeps none."""
    averages = {}
    for what, who in _WHO.items():
        with contextlib.suppress(OSError, ValueError):
            text = (folder / what).read_text(encoding="ascii")
            if average := re.search(rf"^{who} .*\bavg10=([\d.]+)", text, re.MULTILINE):
                averages[what] = float(average[1])
    return Pressure(**averages) if averages else None


def describe_host(folder: Path = PRESSURE) -> Phrase:
    """`load 3.2 on 2 cores, 1.2 of 23 GB free, pressure cpu 40 % memory 0 % io 2 %`, for an incident's evidence."""
    parts = []
    with contextlib.suppress(OSError):
        parts.append(phrase("host_load", load=os.getloadavg()[0], cores=os.cpu_count() or 1))
    memory = psutil.virtual_memory()
    parts.append(phrase("host_memory", free=memory.available / _GB, total=memory.total / _GB))
    pressure = read_pressure(folder)
    if pressure is not None:
        parts.append(phrase("host_pressure", cpu=pressure.cpu, memory=pressure.memory, io=pressure.io))
    if kills := oom_kills():
        parts.append(phrase("host_oom_kills", count=kills))
    return phrase("host", parts=parts)
