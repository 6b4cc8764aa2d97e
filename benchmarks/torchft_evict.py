"""How long a survivor stands still when a replica under torchft is killed, and until the dead one commits again.

The same replicas (benchmarks/replica.py, gloo, steps of 20 ms), one job after the other and one kill at a time:

    loom    `loom run --torchft`: our lighthouse, told of the death by the agent; the replica is forked from a standby
    stock   torchft's own lighthouse as it comes (heartbeat timeout 5 s), each replica under a torchrun that restarts it
    tuned   the same with a heartbeat timeout of 300 ms
    loom3   three replicas; it counts when the last of the two survivors has committed

The clock starts at the SIGKILL and stops at the survivor's first commit in a quorum without the dead: a commit that was
under way does not count. The replicas write their commits down themselves. A further kill waits until all commit
together again. `step_ratio` compares the times between undisturbed commits.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from benchmarks.lives import LOOM
from benchmarks.plane import child, environment, kill_group, plane
from benchmarks.report import finish, quantile, table
from torchloom.settings import Settings

STEP = 0.02
PATIENCE = 90.0
CALM = 25
"""Commits together after which a job has settled."""
SCRIPT = ["-m", "benchmarks.replica"]


class Commit(NamedTuple):
    pid: int
    step: int
    participants: int
    quorum: int
    at: float


class Measured(NamedTuple):
    survived: list[float]
    rejoined: list[float]
    steps: list[float]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.torchft_evict", description=__doc__)
    parser.add_argument("--kills", type=int, default=10, help="of each kind (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="a smoke run")
    args = parser.parse_args()
    kills = 1 if args.quick else args.kills
    chance = random.Random(args.seed)
    found: dict[str, Measured] = {}
    with plane() as settings:
        for name, start, replicas in (
            ("loom", ours, 2), ("stock", stock, 2), ("tuned", tuned, 2), ("loom3", ours, 3),
        ):  # fmt: skip
            found[name] = measure(name, settings, start, replicas, kills, chance)
    rows = [
        (name, quantile(f.survived, 0.5), quantile(f.survived, 0.95), max(f.survived), quantile(f.rejoined, 0.5),
         1000 * quantile(f.steps, 0.5), len(f.survived))
        for name, f in found.items()
    ]  # fmt: skip
    head = ("", "survivor p50", "p95", "max", "rejoin p50", "step ms p50", "kills")
    table("SIGKILL of a replica, s", [head, *rows])
    loom, theirs, quick, three = (found[name] for name in ("loom", "stock", "tuned", "loom3"))
    figures: dict[str, object] = {
        "loom_s_p50": quantile(loom.survived, 0.5),
        "loom_s_p95": quantile(loom.survived, 0.95),
        "stock_s_p50": quantile(theirs.survived, 0.5),
        "tuned_s_p50": quantile(quick.survived, 0.5),
        "ratio": quantile(theirs.survived, 0.5) / quantile(loom.survived, 0.5),
        "loom3_s_p95": quantile(three.survived, 0.95),
        "rejoin_s_p50": quantile(loom.rejoined, 0.5),
        "stock_rejoin_s_p50": quantile(theirs.rejoined, 0.5),
        "step_ratio": quantile(loom.steps, 0.5) / quantile(theirs.steps, 0.5),
        "kills": min(len(f.survived) for f in found.values()),
    }
    finish("torchft_evict", figures)


# ── contenders ──


@contextlib.contextmanager
def ours(settings: Settings, folder: Path, replicas: int) -> Iterator[subprocess.Popen[bytes]]:
    command = [*LOOM, "--torchft", "--replicas", str(replicas), "--nproc-per-node", "1", "--job", folder.name]
    command += ["--max-restarts", "1000", "--log-dir", str(folder / "logs"), *SCRIPT, str(folder), str(STEP)]
    env = environment(settings, OMP_NUM_THREADS="1")
    with (folder / "output").open("wb") as output, child(command, env, stdout=output, stderr=output) as launcher:
        yield launcher


@contextlib.contextmanager
def stock(
    settings: Settings, folder: Path, replicas: int, heartbeat_ms: int = 5000
) -> Iterator[subprocess.Popen[bytes]]:
    """As torchft's own documentation has it: a lighthouse, and a torchrun for each replica."""
    code = (
        "import sys, time; from torchft._torchft import LighthouseServer; "
        "s = LighthouseServer(bind='127.0.0.1:0', min_replicas=1, join_timeout_ms=10000, "
        f"quorum_tick_ms=100, heartbeat_timeout_ms={heartbeat_ms}); "
        "print(s.address(), flush=True); time.sleep(100000)"
    )
    env = environment(settings, OMP_NUM_THREADS="1", RUST_LOG="error", NUM_REPLICA_GROUPS=str(replicas))
    with contextlib.ExitStack() as stack:
        output = stack.enter_context((folder / "output").open("wb"))
        light = stack.enter_context(child([sys.executable, "-c", code], env, stdout=subprocess.PIPE, stderr=output))
        assert light.stdout is not None
        address = f"http://127.0.0.1:{light.stdout.readline().decode().strip().rpartition(':')[2]}"
        for number in range(replicas):
            words = ["-m", "torch.distributed.run", "--nnodes", "1", "--nproc-per-node", "1", "--max-restarts", "1000"]
            words += ["--monitor-interval", "0.1", "--master-port", str(free_port())]
            own = env | {"TORCHFT_LIGHTHOUSE": address, "REPLICA_GROUP_ID": str(number)}
            command = [sys.executable, *words, *SCRIPT, str(folder), str(STEP)]
            launcher = stack.enter_context(child(command, own, stdout=output, stderr=output))
        yield launcher


def tuned(
    settings: Settings, folder: Path, replicas: int
) -> contextlib.AbstractContextManager[subprocess.Popen[bytes]]:
    return stock(settings, folder, replicas, heartbeat_ms=300)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


# ── measuring ──


def measure(
    name: str,
    settings: Settings,
    start: Callable[..., contextlib.AbstractContextManager[subprocess.Popen[bytes]]],
    replicas: int,
    kills: int,
    chance: random.Random,
) -> Measured:
    found = Measured([], [], [])
    with (
        tempfile.TemporaryDirectory(prefix=f"bench-{name}-".replace("_", "-")) as made,
        contextlib.ExitStack() as stack,
    ):
        folder = Path(made)
        stack.callback(sweep, folder, replicas)
        launcher = stack.enter_context(start(settings, folder, replicas))
        print(f"{name:6} ", end="", flush=True)
        for number in range(kills):
            settle(folder, replicas, launcher)
            if name.startswith("loom") and number == 0:
                time.sleep(10)  # until the standbys have imported torch
            found.steps.extend(undisturbed(folder, replicas))
            time.sleep(chance.random() * 3 * STEP)
            victim = chance.randrange(replicas)
            survivors = [other for other in range(replicas) if other != victim]
            old = {other: commits(folder, other)[-1] for other in range(replicas)}
            began = time.monotonic()
            os.kill(old[victim].pid, signal.SIGKILL)
            went_on = [after(folder, other, old[other], launcher) - began for other in survivors]
            back = again(folder, victim, old[victim].pid, launcher) - began
            found.survived.append(max(went_on))
            found.rejoined.append(back)
            print(f"{max(went_on):7.3f}/{back:.2f}", end="", flush=True)
        print(flush=True)
    return found


def commits(folder: Path, replica: int) -> list[Commit]:
    with contextlib.suppress(FileNotFoundError):
        lines = (folder / f"replica{replica}-0").read_text().rpartition("\n")[0].splitlines()[-2000:]
        parts = [line.split() for line in lines]
        return [Commit(int(p), int(s), int(n), int(q), float(at)) for p, s, n, q, at in parts]
    return []


def settle(folder: Path, replicas: int, launcher: subprocess.Popen[bytes]) -> None:
    """All commit together, for a while."""

    def calm() -> bool:
        last = [commits(folder, number)[-CALM:] for number in range(replicas)]
        return all(len(some) == CALM and all(c.participants == replicas for c in some) for some in last)

    wait(calm, launcher, folder)


def undisturbed(folder: Path, replicas: int) -> list[float]:
    """Times between the latest commits that all made together."""
    last = commits(folder, 0)[-CALM:]
    together = all(commit.participants == replicas for commit in last)
    return [b.at - a.at for a, b in itertools.pairwise(last)] if together else []


def after(folder: Path, replica: int, old: Commit, launcher: subprocess.Popen[bytes]) -> float:
    """When it first committed in a quorum after this one."""

    def later() -> list[Commit]:
        return [c for c in commits(folder, replica) if c.quorum > old.quorum]

    wait(lambda: bool(later()), launcher, folder)
    return later()[0].at


def again(folder: Path, replica: int, old: int, launcher: subprocess.Popen[bytes]) -> float:
    """When the next life of it first committed."""

    def newer() -> list[Commit]:
        found = commits(folder, replica)
        return found[next((i for i, c in reversed(list(enumerate(found))) if c.pid == old), -1) + 1 :]

    wait(lambda: bool(newer()), launcher, folder)
    return newer()[0].at


def wait(true: Callable[[], bool], launcher: subprocess.Popen[bytes], folder: Path) -> None:
    end = time.monotonic() + PATIENCE
    while not true():
        said = (folder / "output").read_text(errors="replace")
        if launcher.poll() is not None:
            raise RuntimeError(f"the launcher ended with {launcher.returncode}:\n{said[-3000:]}")
        if time.monotonic() > end:
            raise TimeoutError(f"not within {PATIENCE} s:\n{said[-3000:]}")
        time.sleep(0.02)


def sweep(folder: Path, replicas: int) -> None:
    """Whatever a launcher that had to be killed has left behind."""
    for number in range(replicas):
        for commit in commits(folder, number)[-1:]:
            kill_group(commit.pid)


if __name__ == "__main__":
    main()
