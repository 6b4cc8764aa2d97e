"""GPUs that a test makes up, behind the real pynvml: a libnvidia-ml of our own, built here, says what a file says."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Final

import pytest

SOURCE = Path(__file__).with_name("fake.c")
LIBRARY = "libnvidia-ml.so.1"
A, B = "GPU-aaaa1111-0000-0000-0000-000000000000", "GPU-bbbb2222-0000-0000-0000-000000000000"
XID, DOUBLE_BIT_ECC = 8, 2
"""Types of events, as NVML numbers them."""
WELL: Final = {
    "name": "Fake-A100", "use": 97, "used": 40 * 2**30, "total": 80 * 2**30, "temperature": 65, "power": 312_500,
    "ecc": 0, "reasons": 0, "events": XID | DOUBLE_BIT_ECC,
}  # fmt: skip


def build(folder: Path) -> Path:
    """The library, in a folder where the loader can be told to look."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        pytest.skip("there is no C compiler to build a libnvidia-ml with")
    words = ["-shared", "-fPIC", "-O1", "-Wall", "-Werror", f"-Wl,-soname,{LIBRARY}", "-o", str(folder / LIBRARY)]
    done = subprocess.run([compiler, *words, str(SOURCE)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder / LIBRARY


class FakeDriver:
    """What its GPUs are like, and what happens to them. Every change is there whole at once."""

    def __init__(self, path: Path, *uuids: str) -> None:
        self.path = path
        self.gpus: dict[str, dict[str, object]] = {uuid: dict(WELL) for uuid in uuids}
        self.happened: list[str] = []
        self._write()

    def set(self, uuid: str, **values: object) -> None:
        """None: it does not support that."""
        self.gpus[uuid] |= values
        self._write()

    def hangs(self) -> bool:
        """Whether a call has got stuck."""
        return self.path.with_name(f"{self.path.name}.hangs").exists()

    def lose(self, uuid: str) -> None:
        del self.gpus[uuid]
        self._write()

    def xid(self, uuid: str, number: int) -> None:
        self.event(uuid, XID, number)

    def event(self, uuid: str, kind: int, data: int = 0) -> None:
        self.happened.append(f"event {uuid} {kind} {data}")
        self._write()

    def _write(self) -> None:
        lines = [
            f"gpu {uuid} " + " ".join(f"{key}={value}" for key, value in values.items() if value is not None)
            for uuid, values in self.gpus.items()
        ]
        new = self.path.with_suffix(".new")
        new.write_text("\n".join([*lines, *self.happened]) + "\n")
        new.replace(self.path)
