"""Importing ahead, and whether a process that has done it may be forked.

A fork copies memory but only the thread that forks: a lock or a pool that another thread held stays broken in the
child forever (after one OpenMP region in the parent, every child hangs). So: no other thread may be left. Libraries
that end their threads at a fork (OpenBLAS does) are fine, hence the probe comes first and the count after it. What the
probe child finds, every rank would: CUDA touched by the parent, or a computation that never returns.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import os
import signal
import sys
import time
from pathlib import Path

from torchloom.protocol.phrase import Prose, phrase

PROBE_SECONDS = 10.0
FORKS, BAD_CUDA, BROKEN = 0, 3, 4


def load(module: str) -> Prose:
    """Import it as a process that will be forked should. Returns why that failed, or nothing."""
    # Asking whether there is CUDA must not start CUDA. Ranks do not see it: they get an environment of their own.
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    try:
        importlib.import_module(module)
    except (Exception, SystemExit) as error:  # noqa: BLE001  a broken module must not end the supervisor
        return phrase("cannot_preload", module=module, error=f"{type(error).__name__}: {error}")
    return ""


def settle() -> None:
    """After importing: what a fork must not do twice, or need not do at all."""
    sys.stdout.flush()  # what modules have said belongs to the supervisor's log, not to every rank's
    sys.stderr.flush()
    ctypes.CDLL(None).fflush(None)
    gc.collect()
    gc.freeze()  # never garbage: the collectors of the ranks need not touch it, and so copy it


def why_not_fork() -> Prose:
    """Why no rank should be forked from this process, or nothing. Blocks, up to PROBE_SECONDS where it goes wrong."""
    pid = os.fork()
    if pid == 0:
        os._exit(_probe())
    deadline = time.monotonic() + PROBE_SECONDS
    while (done := os.waitpid(pid, os.WNOHANG)) == (0, 0):
        if time.monotonic() > deadline:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            return phrase("fork_does_not_compute", seconds=PROBE_SECONDS)
        time.sleep(0.002)
    code = os.waitstatus_to_exitcode(done[1])
    if code == BAD_CUDA:
        return phrase("cuda_preloaded")
    if code != FORKS:
        return phrase("fork_breaks", status=code)
    return why_threads()


def why_threads() -> Prose:
    """Why not, as far as threads go; cheap enough to ask before every fork."""
    try:
        count = len(list(Path("/proc/self/task").iterdir()))
    except OSError:
        return phrase("threads_not_counted")
    return phrase("threads_preloaded", count=count - 1) if count > 1 else ""


def memory_mb() -> float:
    """The share of memory that is this process's own; 0 where the kernel does not tell."""
    try:
        rollup = Path("/proc/self/smaps_rollup").read_text()
    except OSError:
        return 0.0
    pss = next((line.split()[1] for line in rollup.splitlines() if line.startswith("Pss:")), "0")
    return int(pss) / 1024


def _probe() -> int:
    try:
        torch = sys.modules.get("torch")
        if torch is not None:
            if torch.cuda._is_in_bad_fork():
                return BAD_CUDA
            torch.ones(1 << 20).add_(1).sum().item()  # large enough to take the thread pool
    except BaseException:  # noqa: BLE001
        return BROKEN
    return FORKS
