"""The peer: torchrun with one rank, restarted by it after each kill, and when it was seen to notice."""

from __future__ import annotations

import contextlib
import queue
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Self

from benchmarks.plane import child, kill_group

SPARE_RESTARTS = 5


class Torchrun:
    """`torchrun --max-restarts` around benchmarks.rank, its stderr read line by line, each line with its time."""

    def __init__(self, pid_file: Path, kills: int, env: dict[str, str]) -> None:
        self.pid_file = pid_file
        self._lines: queue.SimpleQueue[tuple[float, str]] = queue.SimpleQueue()
        self._stack = contextlib.ExitStack()
        # Every word it has to say, so that the earliest sign counts; its default monitoring interval.
        self._env = env | {"LOGLEVEL": "INFO", "TORCH_CPP_LOG_LEVEL": "ERROR", "PYTHONUNBUFFERED": "1"}
        self._command = [
            sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1",
            "--max-restarts", str(kills + SPARE_RESTARTS), "-m", "benchmarks.rank", str(pid_file),
        ]  # fmt: skip

    def __enter__(self) -> Self:
        process = self._stack.enter_context(
            child(self._command, self._env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        )
        threading.Thread(target=self._read, args=(process,), daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()  # it stops its rank before it ends
        with contextlib.suppress(OSError, ValueError):
            kill_group(int(self.pid_file.read_text()))  # and if it was too slow for that, its loaders too

    def _read(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stderr is not None
        for line in process.stderr:
            self._lines.put((time.perf_counter(), line.decode(errors="replace")))

    def noticed(self, pid: int, killed: float, patience: float) -> float:
        """When the first line arrived that shows that it knows of this process's death at `killed`."""
        deadline = time.monotonic() + patience
        seen = []
        while (left := deadline - time.monotonic()) > 0:
            with contextlib.suppress(queue.Empty):
                at, line = self._lines.get(timeout=left)
                seen.append(line)
                signs = "exitcode: -9" in line or "restart worker group" in line or (str(pid) in line and "-9" in line)
                if signs and at > killed:  # it may still have been talking of the kill before
                    return at
        raise RuntimeError("torchrun did not notice:\n" + "".join(seen[-20:]))
