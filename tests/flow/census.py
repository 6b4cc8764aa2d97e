"""A census of what a test has started: processes, ports, shared memory, temporary files. None may be left of it."""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

MARK = "LOOM_TEST_MARK"
"""Everything that a test starts has it in its environment, and so has what that starts."""


@dataclass(frozen=True)
class Census:
    """Taken before; `left` compares with it after. Everything is looked for by a mark in its environment."""

    mark: str
    temporary: Path
    shared: frozenset[str]

    @classmethod
    def take(cls, temporary: Path) -> Census:
        temporary.mkdir(exist_ok=True)
        return cls(secrets.token_hex(8), temporary, frozenset(_shared()))

    @property
    def env(self) -> dict[str, str]:
        return {MARK: self.mark, "TMPDIR": str(self.temporary)}

    def processes(self) -> list[psutil.Process]:
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(OSError, psutil.Error):
                if f"{MARK}={self.mark}".encode() in Path(f"/proc/{process.pid}/environ").read_bytes():
                    found.append(process)
        return found

    def left(self, pids: set[int], ports: set[int], seconds: float = 60.0) -> list[str]:
        """What should be gone and is not, after the kernel had time to take it away."""
        end = time.monotonic() + seconds
        while (found := self._left(pids, ports)) and time.monotonic() < end:
            time.sleep(0.05)
        return found

    def _left(self, pids: set[int], ports: set[int]) -> list[str]:
        found = [f"process {process.pid}: {_command(process)}" for process in self.processes()]
        for pid in pids:
            with contextlib.suppress(psutil.Error):
                if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
                    found.append(f"zombie {pid}")
        heard = [c for c in psutil.net_connections("tcp") if c.status == psutil.CONN_LISTEN and c.laddr.port in ports]
        ours = [c.laddr.port for c in heard if c.pid is None or c.pid in pids]  # else it is another's by now
        found += [f"port {port}" for port in sorted(set(ours))]
        found += [f"shared memory {name}" for name in sorted(_shared() - self.shared) if not _in_use(name)]
        kept = [path.name for path in self.temporary.iterdir() if not path.name.startswith("torchinductor_")]  # torch's
        return found + [f"temporary {name}" for name in sorted(kept)]


def _command(process: psutil.Process) -> str:
    with contextlib.suppress(psutil.Error):
        return " ".join(process.cmdline())[:200]
    return "gone by now"


def _shared() -> set[str]:
    return set(os.listdir("/dev/shm"))  # noqa: PTH208


def _in_use(name: str) -> bool:
    """Whether some process, of whatever test, has it open or mapped: then it is not a leftover."""
    for process in psutil.process_iter():
        with contextlib.suppress(OSError, psutil.Error):
            if f"/dev/shm/{name}" in Path(f"/proc/{process.pid}/maps").read_text():
                return True
            if any(file.path == f"/dev/shm/{name}" for file in process.open_files()):
                return True
    return not Path("/dev/shm", name).exists()
