"""How long from the SIGKILL of a real torch rank until it is known: torchLoom, a bare pidfd, and torchrun.

Every clock is read in this process: just before the kill, when the pidfd becomes readable (the kernel has taken the
process down), when the log entry with the incident arrives at a viewer, and when torchrun's first line about the death
can be read. Kills alternate between the two launchers; the rank and its loader processes are the same. The kernel
closes a dying process's sockets a moment before its pidfd tells of the end, so torchLoom is sometimes the earlier one.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from nats.aio.msg import Msg

from benchmarks.plane import child, environment, kill_group, plane
from benchmarks.report import finish, quantile, table
from benchmarks.torchrun import Torchrun
from torchloom.bus.connection import connect, find
from torchloom.protocol.codec import decode_entry
from torchloom.protocol.records import IncidentOpened, RankJoined
from torchloom.protocol.subjects import LOG, Role
from torchloom.settings import Settings

PATIENCE = 60.0


class Ear:
    """A viewer of the log: when the latest join was read, and when the latest incident arrived."""

    def __init__(self) -> None:
        self.joined: asyncio.Queue[int] = asyncio.Queue()
        self.incidents: asyncio.Queue[float] = asyncio.Queue()

    async def hear(self, message: Msg) -> None:
        at = time.perf_counter()
        for record in decode_entry(message.data).records:
            if isinstance(record, IncidentOpened):
                self.incidents.put_nowait(at)
            elif isinstance(record, RankJoined):
                self.joined.put_nowait(record.hello.pid)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.detect", description=__doc__)
    parser.add_argument("--kills", type=int, default=20, help="of each kind (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="a smoke run")
    args = parser.parse_args()
    kills = 2 if args.quick else args.kills
    with plane() as settings, tempfile.TemporaryDirectory() as folder:
        env = environment(settings, OMP_NUM_THREADS="1")
        off = env | {"TORCHLOOM_OFF": "1"}
        with Torchrun(Path(folder) / "torchrun.pid", kills, off) as torchrun:
            finish("detect", asyncio.run(measure(settings, env, torchrun, Path(folder) / "loom.pid", kills)))


async def measure(
    settings: Settings, env: dict[str, str], torchrun: Torchrun, pid_file: Path, kills: int
) -> dict[str, object]:
    ear = Ear()
    viewer = await connect(find(settings, Role.VIEWER), name="benchmark")
    await viewer.subscribe(LOG.template, cb=ear.hear)
    await viewer.flush()
    loom: list[float] = []
    pidfd: list[float] = []
    theirs: list[float] = []
    their_pidfd: list[float] = []
    print(f"{'kill':>4}  {'torchLoom':>10}  {'pidfd':>10}  {'torchrun':>10}  {'pidfd':>10}   (ms)", flush=True)
    try:
        for number in range(1, kills + 1):
            pid = await _until_file(torchrun.pid_file)  # nobody is starting up while someone is being killed
            with _rank(pid_file, env) as process:
                await _until_joined(ear, process, pid_file)
                await _settle()
                while not ear.incidents.empty():
                    ear.incidents.get_nowait()
                began, gone = await _kill(process.pid)
                told = await asyncio.wait_for(ear.incidents.get(), PATIENCE)
                loom.append((told - began) * 1000)
                pidfd.append((gone - began) * 1000)
            await _settle()
            torchrun.pid_file.unlink()
            began, gone = await _kill(pid)
            theirs.append((await asyncio.to_thread(torchrun.noticed, pid, began, PATIENCE) - began) * 1000)
            their_pidfd.append((gone - began) * 1000)
            kill_group(pid)
            print(f"{number:4}" + "".join(f"  {v[-1]:10.2f}" for v in (loom, pidfd, theirs, their_pidfd)), flush=True)
    finally:
        await viewer.close()
    return _figures(loom, pidfd, theirs, their_pidfd)


def _figures(loom: list[float], pidfd: list[float], theirs: list[float], their_pidfd: list[float]) -> dict[str, object]:
    over = [a - b for a, b in zip(loom, pidfd, strict=True)]
    their_over = [a - b for a, b in zip(theirs, their_pidfd, strict=True)]
    rows = [
        ("pidfd (the kernel's teardown)", pidfd),
        ("torchLoom, incident decided", loom),
        ("  beyond its pidfd", over),
        ("torchrun, noticed", theirs),
        ("  beyond its pidfd", their_over),
    ]
    table(
        f"SIGKILL of a torch rank with two loader processes, {len(loom)} kills each, ms",
        [
            ("", "p50", "min", "p90", "max"),
            *((name, statistics.median(v), min(v), quantile(v, 0.9), max(v)) for name, v in rows),
        ],
    )
    return {
        "loom_ms_p50": statistics.median(loom),
        "pidfd_ms_p50": statistics.median(pidfd),
        "over_pidfd_ms_p50": statistics.median(over),
        "torchrun_ms_p50": statistics.median(theirs),
        "ratio": statistics.median(theirs) / statistics.median(loom),
        "kills": len(loom),
        "loom_ms_max": max(loom),
        "over_pidfd_ms_max": max(over),
        "torchrun_over_pidfd_ms_p50": statistics.median(their_over),
    }


@contextlib.contextmanager
def _rank(pid_file: Path, env: dict[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    pid_file.unlink(missing_ok=True)
    command = [sys.executable, "-m", "benchmarks.rank", str(pid_file)]
    with child(command, env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        yield process


async def _until_joined(ear: Ear, process: subprocess.Popen[bytes], pid_file: Path) -> None:
    """It trains, its loader processes are up, and the weaver knows it."""
    while await asyncio.wait_for(ear.joined.get(), PATIENCE) != process.pid:
        pass
    await _until_file(pid_file)


async def _until_file(file: Path) -> int:
    deadline = time.monotonic() + PATIENCE
    while not file.exists():
        if time.monotonic() > deadline:
            raise RuntimeError("a rank did not start")
        await asyncio.sleep(0.05)
    return int(file.read_text())


async def _settle() -> None:
    """Until start-up noise is over, and then to a moment of chance within torchrun's polling interval."""
    await asyncio.sleep(0.6 + random.random() * 0.3)


async def _kill(pid: int) -> tuple[float, float]:
    """(just before the kill, when the pidfd told of the end)"""
    loop = asyncio.get_running_loop()
    gone: asyncio.Future[float] = loop.create_future()
    fd = os.pidfd_open(pid)

    def readable() -> None:
        at = time.perf_counter()
        loop.remove_reader(fd)
        gone.set_result(at)

    loop.add_reader(fd, readable)
    try:
        began = time.perf_counter()
        os.kill(pid, signal.SIGKILL)
        return began, await asyncio.wait_for(gone, PATIENCE)
    finally:
        loop.remove_reader(fd)
        os.close(fd)


if __name__ == "__main__":
    main()
