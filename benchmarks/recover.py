"""How long from the SIGKILL of a rank until the job has made a step again: `loom run`, warm and cold, and torchrun.

Two ranks, the same script, interpreter and checkpoints, one launch and one kill at a time, launchers in turn. The
clock starts at the kill and stops when both ranks of the new life have finished the step after the checkpoint; the
ranks write that time down themselves. *Warm* is `loom run` as it comes, once its standby has imported torch; *cold* is
`--standby 0`, where new ranks are fresh interpreters as with torchrun.

In favour of torchrun: it checks no checkpoint, while `loom run` reads the newest one through before it starts a rank;
it is given a fresh store for each attempt, without which most of its restarts hang here (the keys of the attempt before
are still in the shared one); and where it did not come back all the same, the kill is left out.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.lives import LOOM, RANKS, SCRIPT, SETTLED, life, standby_mb, sweep, until
from benchmarks.plane import child, environment, plane
from benchmarks.report import finish, table
from torchloom.settings import Settings

BACK_SECONDS = 30.0
"""Who has not come back after so long never will."""
LAUNCHERS = {
    "loom, warm": [*LOOM],
    "loom, cold": [*LOOM, "--standby", "0"],
    "torchrun": [sys.executable, "-m", "torch.distributed.run", "--standalone"],
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.recover", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="kills of each kind (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="a smoke run")
    args = parser.parse_args()
    took: dict[str, list[float]] = {name: [] for name in LAUNCHERS}
    standby: list[int] = []
    with plane() as settings:
        print("round  " + "".join(f"{name:>12}" for name in LAUNCHERS) + "   (s)", flush=True)
        for number in range(1 if args.quick else args.rounds):
            print(f"{number + 1:5}  ", end="", flush=True)
            for name in LAUNCHERS:
                took[name].append(measure(settings, name, victim=number % RANKS, standby=standby))
                print(f"{took[name][-1]:12.3f}", end="", flush=True)
            print(flush=True)
    finish("recover", figures(took, standby))


def figures(took: dict[str, list[float]], standby: list[int]) -> dict[str, object]:
    came = {name: [value for value in values if not math.isnan(value)] for name, values in took.items()}
    rows = [(name, middle(v), min(v, default=math.nan), max(v, default=math.nan), len(v)) for name, v in came.items()]
    table("SIGKILL of a rank until the next new step, s", [("", "p50", "min", "max", "kills"), *rows])
    warm, cold, theirs = (middle(came[name]) for name in LAUNCHERS)
    return {
        "loom_warm_s": warm,
        "loom_cold_s": cold,
        "torchrun_s": theirs,
        "ratio_warm": theirs / warm,
        "ratio_cold": theirs / cold,
        "standby_mb": middle([float(value) for value in standby]),
        "kills": min(map(len, came.values())),
        "torchrun_never_back": len(took["torchrun"]) - len(came["torchrun"]),
        "loom_warm_max_s": max(came["loom, warm"], default=math.nan),
    }


def middle(values: list[float]) -> float:
    return statistics.median(values) if values else math.nan


def measure(settings: Settings, name: str, victim: int, standby: list[int]) -> float:
    """Launch, let it train, kill one, and see how long it takes; NaN if it never came back."""
    with tempfile.TemporaryDirectory() as made, contextlib.ExitStack() as stack:
        folder = Path(made)
        stack.callback(sweep, folder)
        command = [*LAUNCHERS[name], "--nproc-per-node", str(RANKS), "--max-restarts", "3"]
        env = environment(settings, OMP_NUM_THREADS="1", TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1")
        if name != "torchrun":
            command += ["--checkpoint-dir", str(folder), "--log-dir", str(folder / "logs")]
        with (folder / "output").open("wb") as output:
            launcher = stack.enter_context(
                child([*command, *SCRIPT, str(folder)], env, stdout=output, stderr=subprocess.STDOUT)
            )
            until(lambda: min(len(life(folder, rank)) for rank in range(RANKS)) >= SETTLED, launcher, folder)
            if name == "loom, warm":
                until(lambda: standby_mb(settings, launcher) > 0, launcher, folder)
                standby.append(standby_mb(settings, launcher))
            time.sleep(0.6 + random.random() * 0.3)  # at a moment of chance within anyone's polling interval
            old = [life(folder, rank)[-1][0] for rank in range(RANKS)]
            began = time.monotonic()
            os.kill(old[victim], signal.SIGKILL)
            with contextlib.suppress(TimeoutError):
                back = lambda: all(life(folder, rank)[-1][0] != old[rank] for rank in range(RANKS))  # noqa: E731
                until(back, launcher, folder, BACK_SECONDS)
                return max(life(folder, rank)[0][2] for rank in range(RANKS)) - began
            return math.nan


if __name__ == "__main__":
    main()
