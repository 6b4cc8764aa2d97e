"""How long from a rank that freezes, or holds its interpreter, until that is known, and until the job trains again.

Two ranks of DDP on gloo with steps of 20 ms, the same script for all launchers (it does not even attach). The fault is
SIGSTOP of one rank, or C code in it that waits for ever and does not release the interpreter. *Known* is the moment at
which an incident names that rank and holds the stacks of both; *resumed* the moment at which both ranks of the next
life have finished the step after the checkpoint. The same under torchrun, which is given 30 s: what it does not notice
counts as 30. Then two ranks train for two minutes while twice as many processes as there are cores do nothing but
compute: a rank that is ended meanwhile is a false kill.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.lives import LOOM, RANKS, SCRIPT, SETTLED, life, standby_mb, sweep, until
from benchmarks.plane import child, environment, plane
from benchmarks.recover import middle
from benchmarks.report import finish, table
from torchloom.bus.weaver_client import WeaverClient
from torchloom.protocol.subjects import Role
from torchloom.protocol.views import IncidentView
from torchloom.settings import Settings

CAP = 30.0
VICTIM = 1
FAULTS = ("sigstop", "gil")
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
LEARNT = 6.0
"""Seconds of training before the fault: as long as it takes to know how long a step is."""


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.hang", description=__doc__)
    parser.add_argument("--rounds", type=int, default=3, help="faults of each kind (default: %(default)s)")
    parser.add_argument(
        "--calm", type=float, default=120.0, metavar="SECONDS", help="under load (default: %(default)s)"
    )
    parser.add_argument("--quick", action="store_true", help="a smoke run")
    args = parser.parse_args()
    rounds, calm = (1, 10.0) if args.quick else (args.rounds, args.calm)
    known: dict[str, list[float]] = {fault: [] for fault in FAULTS}
    resumed: dict[str, list[float]] = {fault: [] for fault in FAULTS}
    theirs: dict[str, list[float]] = {fault: [] for fault in FAULTS}
    with plane() as settings:
        print("round  fault     known  resumed  torchrun   (s)", flush=True)
        for number in range(rounds):
            for fault in FAULTS:
                found = strike(settings, fault)
                known[fault].append(found[0])
                resumed[fault].append(found[1])
                if number == 0:  # it is the same each time, and half a minute long
                    theirs[fault].append(torchrun(settings, fault))
                last = theirs[fault][-1] if number == 0 else math.nan
                print(f"{number + 1:5}  {fault:8}{found[0]:7.2f}{found[1]:9.2f}{last:10.2f}", flush=True)
        false_kills, slowest = busy(settings, calm)
    rows = [(f, middle(known[f]), max(known[f]), middle(resumed[f]), max(resumed[f]), theirs[f][0]) for f in FAULTS]
    table("fault of one of two ranks, s", [("", "known p50", "max", "resumed p50", "max", "torchrun"), *rows])
    finish(
        "hang",
        {
            "sigstop_detect_s": max(known["sigstop"]),
            "gil_detect_s": max(known["gil"]),
            "resumed_s": max(resumed["sigstop"] + resumed["gil"]),
            "torchrun_s": min(theirs["sigstop"] + theirs["gil"]),
            "torchrun_cap_s": CAP,
            "false_kills": false_kills,
            "busy_seconds": calm,
            "busy_longest_step_s": slowest,
            "faults": rounds,
        },
    )


@contextlib.contextmanager
def training(settings: Settings, command: list[str], **env: str) -> Iterator[tuple[Path, subprocess.Popen[bytes]]]:
    """A launcher and its ranks, well under way."""
    with tempfile.TemporaryDirectory() as made, contextlib.ExitStack() as stack:
        folder = Path(made)
        stack.callback(sweep, folder)
        command = [*command, "--nproc-per-node", str(RANKS), "--max-restarts", "3"]
        if command[: len(LOOM)] == LOOM:
            command += [
                "--checkpoint-dir",
                str(folder),
                "--log-dir",
                str(folder / "logs"),
                "--job",
                f"hang-{os.getpid()}",
            ]
        around = environment(settings, OMP_NUM_THREADS="1", TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1", **env)
        with (folder / "output").open("wb") as output:
            launcher = stack.enter_context(
                child([*command, *SCRIPT, str(folder)], around, stdout=output, stderr=subprocess.STDOUT)
            )
            until(lambda: min(len(life(folder, rank)) for rank in range(RANKS)) >= SETTLED, launcher, folder)
            if command[: len(LOOM)] == LOOM:
                until(lambda: standby_mb(settings, launcher) > 0, launcher, folder)
            time.sleep(LEARNT)
            yield folder, launcher


def strike(settings: Settings, fault: str) -> tuple[float, float]:
    """Seconds until the fault was known, with stacks, and until the job had made a new step."""
    with training(settings, LOOM) as (folder, launcher):
        old = [life(folder, rank)[-1][0] for rank in range(RANKS)]
        since = time.time()
        began = inflict(folder, fault, old[VICTIM])
        known = asyncio.run(_known(settings, since, began))
        until(lambda: all(life(folder, rank)[-1][0] != old[rank] for rank in range(RANKS)), launcher, folder, CAP)
        return known, max(life(folder, rank)[0][2] for rank in range(RANKS)) - began


def torchrun(settings: Settings, fault: str) -> float:
    with training(settings, TORCHRUN, TORCHLOOM_OFF="1") as (folder, launcher):
        old = [life(folder, rank)[-1][0] for rank in range(RANKS)]
        began = inflict(folder, fault, old[VICTIM])
        with contextlib.suppress(TimeoutError):
            until(lambda: all(life(folder, rank)[-1][0] != old[rank] for rank in range(RANKS)), launcher, folder, CAP)
            return max(life(folder, rank)[0][2] for rank in range(RANKS)) - began
        with contextlib.suppress(ProcessLookupError):
            os.kill(old[VICTIM], signal.SIGKILL)
        return CAP


def inflict(folder: Path, fault: str, pid: int) -> float:
    """When it began."""
    if fault == "sigstop":
        began = time.monotonic()
        os.kill(pid, signal.SIGSTOP)
        return began
    order = folder / f"hold-{VICTIM}"
    order.touch()
    while order.exists():  # the rank takes it away just before it holds its interpreter
        time.sleep(0.001)
    return time.monotonic()


async def _known(settings: Settings, since: float, began: float) -> float:
    async with WeaverClient(settings, Role.VIEWER, timeout=2) as weaver:
        while time.monotonic() - began < CAP:
            incidents = (await weaver.cluster(most=0)).incidents
            if any(_tells(incident) for incident in incidents if incident.opened >= since):
                return time.monotonic() - began
            await asyncio.sleep(0.01)
    return math.nan


def _tells(incident: IncidentView) -> bool:
    """It blames the right rank and holds the stacks of both."""
    stacks = "\n".join(incident.evidence)
    right = (
        incident.kind in {"frozen", "held"} and incident.about.rank is not None and incident.about.rank.rank == VICTIM
    )
    return right and "where the ranks were" in stacks and all(f"rank {rank} " in stacks for rank in range(RANKS))


def busy(settings: Settings, seconds: float) -> tuple[int, float]:
    """Ranks that were ended while the machine had more to do than it could, and the longest step meanwhile."""
    burn = [sys.executable, "-S", "-c", "while True: pass"]
    with training(settings, LOOM) as (folder, launcher), contextlib.ExitStack() as stack:
        for _ in range(2 * (os.cpu_count() or 1)):
            stack.enter_context(child(burn, dict(os.environ)))
        old = [life(folder, rank)[-1][0] for rank in range(RANKS)]
        end = time.monotonic() + seconds
        while time.monotonic() < end and launcher.poll() is None:
            time.sleep(0.5)
        steps = [life(folder, rank) for rank in range(RANKS)]
        ended = sum(each[-1][0] != pid for each, pid in zip(steps, old, strict=True)) or int(
            launcher.poll() is not None
        )
        ats = [at for _, _, at in steps[0]]
        return ended, max((after - before for before, after in itertools.pairwise(ats)), default=math.nan)


if __name__ == "__main__":
    main()
