"""Whether a machine is fit for ranks: its devices answer and compute, there is memory and disk, its clock is right.

Every check says what it found and, where that is not good enough, what to do about it. How fast the machine is can only
be told beside others, so the time of the same small computation goes along (core/fitness.py compares).
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from torchloom.agent.monitor.gpus import Gpus, Seen
from torchloom.agent.node_check import trials
from torchloom.protocol.node import Check
from torchloom.protocol.views import NodeChecksView

_MB = 1024 * 1024
MEMORY_MB = 512
"""Free memory, disk and shared memory below which a rank is likely to fail at once."""
DISK_MB = 512
SHARED_MB = 16
SKEW_SECONDS = 5.0
READ_SECONDS = 5.0
"""In which every device has to have answered."""
SHARED = Path("/dev/shm")


@dataclass(frozen=True)
class Subject:
    """What is looked at."""

    devices: tuple[str, ...] = ()
    state: Path | None = None
    checkpoints: Path | None = None
    skew: float | str | None = None
    """Seconds by which its clock is ahead of the weaver's, or why that is not known; absent: not asked for."""


def examine(subject: Subject, look: Callable[[], Sequence[Seen]] | None = None) -> NodeChecksView:
    """All checks. Takes seconds; call it in a thread. `look` tells what devices said last."""
    checks = [*_devices(subject.devices, look), memory(), *_disks(subject)]
    if subject.skew is not None:
        checks.append(clock(subject.skew))
    computed, pace, on = computing(subject.devices)
    return NodeChecksView(checks=(*checks, *computed), pace=pace, on=on)


def reasons(view: NodeChecksView) -> tuple[str, ...]:
    """Why a node is not fit, if it is not."""
    return tuple(f"{check.what}: {check.found}"[:2000] for check in view.checks if not check.fit)[:64]


# ── devices ──


def _devices(devices: tuple[str, ...], look: Callable[[], Sequence[Seen]] | None) -> Iterator[Check]:
    if not devices:
        return
    gpus = None
    if look is None:
        gpus = Gpus(devices)
        gpus.start()
        look = gpus.look
    try:
        seen = {one.device: one for one in _read(devices, look)}
    finally:
        if gpus is not None:
            gpus.close()
    for device in devices:
        yield answering(device, seen.get(device))


def _read(devices: tuple[str, ...], look: Callable[[], Sequence[Seen]]) -> Sequence[Seen]:
    end = time.monotonic() + READ_SECONDS
    while True:
        seen = look()
        known = {one.device for one in seen if one.reading is not None or one.lost}
        if known.issuperset(devices) or time.monotonic() > end:
            return seen
        time.sleep(0.05)


def answering(device: str, seen: Seen | None) -> Check:
    if seen is not None and seen.lost:
        return Check(what=device, found=seen.lost, fit=False, remedy="reset it or restart the machine: nvidia-smi -r")
    if seen is None or seen.reading is None:
        return Check(what=device, found="the driver says nothing of it", fit=False, remedy="look at it: nvidia-smi")
    reading = seen.reading
    told = [reading.name or "it answers"]
    if reading.temperature is not None:
        told.append(f"{reading.temperature:.0f} °C")
    if reading.memory_mb is not None and reading.memory_total_mb:
        told.append(f"{reading.memory_mb:,.0f} of {reading.memory_total_mb:,.0f} MB used")
    return Check(what=device, found=", ".join(told))


# ── memory and disk ──


def memory() -> Check:
    free, total = psutil.virtual_memory().available // _MB, psutil.virtual_memory().total // _MB
    found = f"{free:,} of {total:,} MB free"
    return Check(what="memory", found=found, fit=free >= MEMORY_MB, remedy="" if free >= MEMORY_MB else _FREE_MEMORY)


_FREE_MEMORY = "see what holds it: ps aux --sort=-rss | head"


def _disks(subject: Subject) -> Iterator[Check]:
    wanted = [
        ("state folder", subject.state, DISK_MB),
        ("checkpoint folder", subject.checkpoints, DISK_MB),
        ("temporary files", Path(tempfile.gettempdir()), DISK_MB),
        ("shared memory", SHARED if SHARED.is_dir() else None, SHARED_MB),
    ]
    for what, folder, least in wanted:
        if folder is not None:
            yield disk(what, folder, least, ours=folder is not subject.checkpoints)


def disk(what: str, folder: Path, least_mb: int, ours: bool = True) -> Check:
    """Room in a folder, and whether it can be written to. One that is still to be made is where it will be.

    One that others make is fit then, but has a remedy: perhaps what should be mounted there is not.
    """
    there = next((path for path in (folder, *folder.parents) if path.exists()), folder)
    try:
        free = shutil.disk_usage(there).free // _MB
        if not os.access(there, os.W_OK | os.X_OK):
            raise PermissionError(13, "it cannot be written to")
    except OSError as error:
        found = f"{folder}: {error.strerror or error}"
        return Check(what=what, found=found, fit=False, remedy=f"mount it, or let this user write there: {there}")
    fit = free >= least_mb
    if there != folder:
        found = f"{folder}: not there yet; its disk, that of {there}, has {free:,} MB free"
    else:
        found = f"{folder}: {free:,} MB free"
    remedy = "" if fit else f"at least {least_mb} MB are needed: make room in {there}"
    if not fit and there == SHARED:
        remedy = f"at least {least_mb} MB are needed: start the container with more, as --shm-size 8g"
    if fit and there != folder and not ours:
        either = f" ({folder.parent} is not there either)" if there != folder.parent else ""
        remedy = f"mount it if it is to be mounted{either}; else it is made with the first checkpoint"
    return Check(what=what, found=found, fit=fit, remedy=remedy)


# ── clock ──


def clock(skew: float | str) -> Check:
    """Nothing is decided by it; but what people read in logs of two machines has to fit together."""
    if isinstance(skew, str):
        return Check(what="clock", found=f"not compared: {skew}")
    fit = abs(skew) <= SKEW_SECONDS
    found = f"{abs(skew):.1f} s {'ahead of' if skew > 0 else 'behind'} the weaver's"
    if abs(skew) < 0.1:
        found = "as the weaver's"
    return Check(what="clock", found=found, fit=fit, remedy="" if fit else "let it be set: chronyc makestep")


# ── computing ──


def computing(devices: tuple[str, ...]) -> tuple[list[Check], float | None, str]:
    """The same product of matrices on each device, or on a core where there are none: is it right, and how long?"""
    checks: list[Check] = []
    slowest: float | None = None
    on = ""
    for device in devices or ("",):
        env = {"CUDA_VISIBLE_DEVICES": device} if device else {}
        found = trials.run(("compute",), trials.COMPUTE_SECONDS, env)
        check, seconds = computed(device, found)
        checks.append(check)
        if seconds is not None and (slowest is None or seconds > slowest):
            slowest, on = seconds, str(found["on"])[:100]
    return checks, slowest, on


def computed(device: str, found: dict[str, object]) -> tuple[Check, float | None]:
    what = f"computing on {device}"[:64] if device else "computing"
    remedy = "look at the device: nvidia-smi, dmesg" if device else "look at the machine: dmesg"
    if trouble := found.get("trouble"):
        return Check(what=what, found=str(trouble)[:2000], fit=False, remedy=remedy), None
    seconds = found.get("seconds")
    if not found.get("on") or not isinstance(seconds, float):
        return Check(what=what, found="not checked: there is neither torch nor numpy"), None
    if device and not found.get("cuda"):
        return Check(what=what, found="not checked: this torch does not find the device"), None
    if not found.get("right"):
        return Check(what=what, found="the product of two matrices came out wrong", fit=False, remedy=remedy), None
    return Check(what=what, found=f"{seconds * 1000:.2f} ms with {found['on']}"), seconds
