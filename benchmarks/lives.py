"""Ranks of benchmarks/recovering_rank.py under some launcher, seen through what they write down."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.plane import kill_group
from torchloom.bus.weaver_client import WeaverClient
from torchloom.protocol.subjects import Role
from torchloom.settings import Settings

PATIENCE = 60.0
SETTLED = 30
"""Steps of a life after which its start is over."""
RANKS = 2
SCRIPT = ["-m", "benchmarks.recovering_rank"]
LOOM = [sys.executable, "-P", "-m", "torchloom.cli.main", "run"]


def life(folder: Path, rank: int) -> list[tuple[int, int, float]]:
    """What the latest life of a rank has written: pid, step and time of each step."""
    with contextlib.suppress(FileNotFoundError):
        lines = (folder / f"rank{rank}").read_text().rpartition("\n")[0].splitlines()
        steps = [(int(pid), int(step), float(at)) for pid, step, at in map(str.split, lines)]
        return [step for step in steps if step[0] == steps[-1][0]]
    return []


def until(true: Callable[[], bool], launcher: subprocess.Popen[bytes], folder: Path, seconds: float = PATIENCE) -> None:
    end = time.monotonic() + seconds
    while not true():
        if launcher.poll() is not None:
            said = (folder / "output").read_text(errors="replace")
            raise RuntimeError(f"the launcher ended with {launcher.returncode}:\n{said[-3000:]}")
        if time.monotonic() > end:
            raise TimeoutError
        time.sleep(0.05)


def standby_mb(settings: Settings, launcher: subprocess.Popen[bytes]) -> int:
    """Of this launcher: the weaver still knows those before it."""

    async def look() -> int:
        async with WeaverClient(settings, Role.VIEWER, timeout=2) as weaver:
            beats = [node.beat for node in (await weaver.runs()).nodes]
        return sum(beat.standby_mb for beat in beats if beat.pid == launcher.pid)

    return asyncio.run(look())


def sweep(folder: Path) -> None:
    """Whatever a launcher that had to be killed has left behind."""
    for rank in range(RANKS):
        for pid in {step[0] for step in life(folder, rank)[-1:]}:
            kill_group(pid)
