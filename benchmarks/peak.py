"""A process that makes a state, saves it some times, and tells the most memory it ever had."""

from __future__ import annotations

import sys
from pathlib import Path

from benchmarks.savers import Dcp, Saver, TorchLoom, Training, remove


def main(name: str, megabytes: str, saves: str, folder: str) -> None:
    training = Training(float(megabytes))
    if name != "none":
        saver = _saver(name, training, Path(folder))
        for step in range(1, int(saves) + 1):
            path = Path(folder) / f"step-{step}"
            saver.begin(path)
            saver.finish()
            remove(path)
    status = Path("/proc/self/status").read_text()
    # Not ru_maxrss: that begins with what the parent had.
    print(next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM:")))


def _saver(name: str, training: Training, folder: Path) -> Saver:
    return TorchLoom(training, folder) if name == "torchloom" else Dcp(training)


if __name__ == "__main__":
    main(*sys.argv[1:])
