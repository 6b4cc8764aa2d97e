"""The tests that draw their examples, with others than those `make test` always draws."""

from __future__ import annotations

import subprocess
import sys

WANTED = ("-m", "hypothesis and not long", "--hypothesis-profile=drawn", "-q", "-n", "2")


def run(seed: int, seconds: float) -> list[str]:  # noqa: ARG001  it takes as long as it takes, about a minute
    command = [sys.executable, "-m", "pytest", *WANTED, f"--hypothesis-seed={seed}", "tests"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = done.stdout.strip().splitlines()
    print(f"  {lines[-1].strip('= ')}" if lines else "  nothing was said", flush=True)
    return [] if done.returncode == 0 else [f"{' '.join(command[1:])}\n{done.stdout[-6000:]}{done.stderr[-2000:]}"]
