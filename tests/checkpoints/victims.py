"""Real processes that save, and are killed at a system call, or get from it the error of a full disk.

They are forked from one that has imported torch, so that a hundred of them take seconds. A victim attaches strace to
itself when it comes to what is to be tried; strace counts the calls of each thread from there on.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tests.fork_server import FORKS
from torchloom.checkpoints.api import Checkpoints
from torchloom.checkpoints.store.commit import HIDDEN

CALLS = (
    "openat", "mkdir", "mkdirat", "write", "pwrite64", "writev", "fsync", "fdatasync", "close",
    "rename", "renameat", "renameat2", "unlink", "unlinkat", "rmdir", "ftruncate",
)  # fmt: skip
"""All by which a save changes anything. A process killed before each of them was killed between any two of them."""


def run(task: Callable[..., None], *args: object) -> int:
    """What it ended with, in a process of its own."""
    process = FORKS.Process(target=task, args=args)
    process.start()
    process.join(120)
    assert process.exitcode is not None, "it did not end"
    return process.exitcode


def begin(task: Callable[..., None], *args: object) -> Any:
    """Start it in a process of its own, without waiting."""
    process = FORKS.Process(target=task, args=args)
    process.start()
    return process


def kill(process: Any) -> None:
    os.kill(process.pid, signal.SIGKILL)
    process.join(60)


def state(value: float) -> dict[str, Any]:
    return {"model": {"weight": torch.full((3000,), value), "bias": torch.full((7,), value)}, "value": value}


def value_of(loaded: dict[str, Any]) -> float:
    """Which state it is, all of it."""
    value = float(loaded["value"])
    assert all(torch.equal(loaded["model"][name], tensor) for name, tensor in state(value)["model"].items())
    return value


def leftovers(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if HIDDEN.fullmatch(path.name))


# ── strace ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def trace(log: Path, rules: tuple[str, ...], calls: tuple[str, ...] = CALLS) -> subprocess.Popen[bytes]:
    """From here on this process's calls are counted, and answered by these rules."""
    injected = [word for rule in rules for word in ("-e", f"inject={rule}")]
    command = ["strace", "-f", "-o", str(log), "-e", f"trace={','.join(calls)}", *injected, "-p", str(os.getpid())]
    tracer = subprocess.Popen(command, stderr=subprocess.PIPE)
    assert tracer.stderr is not None
    told = tracer.stderr.readline()
    assert b"attached" in told, told
    return tracer


def why_untraceable() -> str:
    """Empty if strace works here."""
    if shutil.which("strace") is None:
        return "strace is not installed"
    tried = subprocess.run(
        ["strace", "-o", "/dev/null", "-e", "inject=mkdir:error=EIO", "true"], capture_output=True, text=True
    )
    return f"strace cannot trace here: {tried.stderr.strip()}" if tried.returncode else ""


def counted(log: Path) -> Counter[str]:
    """How often each call was made by the thread that made it most."""
    calls = Counter(re.findall(r"^(\d+) +(\w+)\(", log.read_text(), re.MULTILINE))
    most: Counter[str] = Counter()
    for (_, call), count in calls.items():
        most[call] = max(most[call], count)
    return most


# ── what they do ─────────────────────────────────────────────────────────────────────────────────────────────────────


def save_twice(folder: Path, step: int, keep: int | None, log: Path, *rules: str) -> None:
    """Step 1 in peace; then this step, watched."""
    checkpoints = Checkpoints(folder, keep=keep)
    checkpoints.save(1, state(1.0))
    checkpoints.wait()
    trace(log, rules)
    checkpoints.save(step, state(2.0), now=True)
    checkpoints.wait()


def save_three(folder: Path, step: int, log: Path, *rules: str) -> None:
    """Step 1 in peace, this step by the rules, step 3 in peace again; into a file what is seen after the last two."""
    checkpoints = Checkpoints(folder)
    checkpoints.save(1, state(1.0))
    checkpoints.wait()
    tracer = trace(log, rules)
    told = []
    for number, value in ((step, 2.0), (3, 3.0)):
        saving = checkpoints.save(number, state(value), now=True)
        assert saving is not None
        assert saving.wait(30)
        tracer.terminate()
        tracer.wait()
        told.append((saving.error, leftovers(folder), value_of(checkpoints.load().state)))
    log.with_suffix(".json").write_text(json.dumps(told))
