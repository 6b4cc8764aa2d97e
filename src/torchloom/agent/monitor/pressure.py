"""How a machine fares, as its kernel tells: who waits for what, how much memory is free, who was killed for want of it.

Nothing here fails: what a kernel does not tell is left out.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import psutil

from torchloom.agent.monitor.exit_evidence import oom_kills
from torchloom.protocol.node import Pressure

PRESSURE = Path("/proc/pressure")
_WHO = {"cpu": "some", "memory": "full", "io": "full"}
"""A busy machine always lets some wait for memory or a disk; for a processor there is no moment in which all do."""
_GB = 1024**3


def read_pressure(folder: Path = PRESSURE) -> Pressure | None:
    """The kernel's own averages over ten seconds; None where it keeps none."""
    found = {what: _average(folder / what, who) for what, who in _WHO.items()}
    if all(value is None for value in found.values()):
        return None
    return Pressure(**{what: value for what, value in found.items() if value is not None})


def _average(path: Path, who: str) -> float | None:
    try:
        for line in path.read_text(encoding="ascii").splitlines():
            kind, *fields = line.split()
            if kind == who:
                return float(dict(field.split("=", 1) for field in fields)["avg10"])
    except (OSError, ValueError, KeyError):
        pass
    return None


def host_line(folder: Path = PRESSURE) -> str:
    """`load 3.2 on 2 cores, 1.2 of 23 GB free, pressure cpu 40 % memory 0 % io 2 %`, for an incident's evidence."""
    parts = []
    cores = os.cpu_count() or 1
    with contextlib.suppress(OSError):
        parts.append(f"load {os.getloadavg()[0]:.1f} on {cores} core{'s' if cores != 1 else ''}")
    memory = psutil.virtual_memory()
    parts.append(f"{memory.available / _GB:.1f} of {memory.total / _GB:.0f} GB free")
    pressure = read_pressure(folder)
    if pressure is not None:
        parts.append(f"pressure cpu {pressure.cpu:.0f} % memory {pressure.memory:.0f} % io {pressure.io:.0f} %")
    if killed := oom_kills():
        parts.append(f"{killed} process{'es' if killed != 1 else ''} of its cgroup killed for want of memory so far")
    return ", ".join(parts)
