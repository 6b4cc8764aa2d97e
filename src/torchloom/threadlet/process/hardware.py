"""The devices and the memory use of a rank, read without touching the state of the training."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil
import pynvml

from torchloom.shared.nvml import ERRORS, nvml
from torchloom.threadlet.process.identity import sanitised

_MB = 1024 * 1024
_MACHINE_IDS = (Path("/etc/machine-id"), Path("/var/lib/dbus/machine-id"))


def find_devices(visible: str | None, local_rank: int | None, node: str) -> tuple[str, ...]:
    """The ids of this rank's devices: its GPU by uuid, otherwise the host's CPU. `visible` is CUDA_VISIBLE_DEVICES."""
    return own_devices(visible_devices(gpu_uuids(), visible), local_rank) or (cpu_id(node, machine_id()),)


def gpu_uuids() -> tuple[str, ...]:
    """Every GPU of the machine in the order of the driver; none without one."""
    try:
        with nvml():
            handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
            return tuple(sanitised(pynvml.nvmlDeviceGetUUID(handle)) for handle in handles)
    except ERRORS:
        return ()


def visible_devices(uuids: Sequence[str], visible: str | None) -> tuple[str, ...]:
    """What CUDA lets a process see, as CUDA itself reads CUDA_VISIBLE_DEVICES: entries up to the first invalid one.

    Indices are taken in the driver's order. CUDA sorts by speed unless CUDA_DEVICE_ORDER=PCI_BUS_ID is set, which is
    the same order wherever all GPUs of a machine are alike.
    """
    if visible is None:
        return tuple(uuids)
    devices: list[str] = []
    for entry in (part.strip() for part in visible.split(",")):
        if entry.startswith("MIG-"):  # a slice of a GPU is a device of its own; NVML lists only whole ones
            devices.append(sanitised(entry))
            continue
        if entry.isdecimal():
            matching = [uuids[int(entry)]] if int(entry) < len(uuids) else []
        else:  # a uuid may be abbreviated as long as it is unambiguous
            matching = [full for full in uuids if entry and full.startswith(entry)]
        if len(matching) != 1 or matching[0] in devices:
            break
        devices.append(matching[0])
    return tuple(devices)


def own_devices(visible: Sequence[str], local_rank: int | None) -> tuple[str, ...]:
    """The one device of a local rank. With one visible it is that one, whatever the number (--virtual-local-rank)."""
    if not visible:
        return ()
    return (visible[(local_rank or 0) % len(visible)],)


def cpu_id(node: str, machine: str) -> str:
    """A stable id of a host's CPU. The host name is part of it: containers may share a machine id."""
    return f"CPU-{uuid.uuid5(uuid.NAMESPACE_OID, f'{machine}/{node}')}"


def machine_id() -> str:
    # Not uuid.getnode(): where it finds no address it draws from the global random module.
    for path in _MACHINE_IDS:
        with contextlib.suppress(OSError):
            text = path.read_text(encoding="ascii", errors="replace").strip()
            if text:
                return text
    return ""


@functools.cache
def _this_process(pid: int) -> psutil.Process:
    return psutil.Process(pid)  # making one costs more than asking it


def rss_mb() -> float:
    with contextlib.suppress(psutil.Error, OSError):
        return float(round(_this_process(os.getpid()).memory_info().rss / _MB, 1))
    return 0.0


def free_mb(proc: Path = Path("/proc/self"), root: Path = Path("/sys/fs/cgroup")) -> float | None:
    """What is left of the machine's memory, or of the cgroup's if that is less."""
    try:
        left = float(psutil.virtual_memory().available)
    except (psutil.Error, OSError):
        return None
    for folder in _memory_cgroups(proc, root):
        with contextlib.suppress(OSError, ValueError):  # "max": no limit
            left = min(left, int((folder / "memory.max").read_text()) - int((folder / "memory.current").read_text()))
    return float(round(max(0.0, left) / _MB, 1))


@functools.cache
def _memory_cgroups(proc: Path, root: Path) -> tuple[Path, ...]:
    """Of this process, from its own up to the root: each may have a limit. None before cgroups of version 2."""
    with contextlib.suppress(OSError):
        for line in (proc / "cgroup").read_text().splitlines():
            if line.startswith("0::"):
                own = root / line[3:].strip("/")
                return tuple(path for path in (own, *own.parents) if path.is_relative_to(root) and path.is_dir())
    return ()


def device_mb() -> float | None:
    """What torch's allocator holds, read from its own counters: no import, no initialisation, no synchronisation."""
    return _of_devices(lambda cuda, index: cuda.memory_allocated(index))


def device_free_mb() -> float | None:
    """What the driver says is left on this process's devices."""
    return _of_devices(lambda cuda, index: cuda.mem_get_info(index)[0])


def _of_devices(ask: Callable[[Any, int], float]) -> float | None:
    torch = sys.modules.get("torch")
    with contextlib.suppress(Exception):  # torch may be half imported, or its CUDA broken; a beat goes out anyway
        if torch is not None and torch.cuda.is_initialized():
            total = sum(ask(torch.cuda, index) for index in range(torch.cuda.device_count()))
            return float(round(total / _MB, 1))
    return None
