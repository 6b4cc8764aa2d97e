"""The process that waits for a job."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from tests.agent.harness import ENV, SupervisorHarness, until
from torchloom.agent.supervisor import spare
from torchloom.agent.supervisor.supervisor_client import SupervisorOptions


@pytest.mark.parametrize("moment", ["starts", "imports"])
async def test_an_agent_that_leaves_before_its_spare_is_ready_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    monkeypatch.setattr(spare, "PAUSE", 0.0)
    loads = tmp_path / "loads"
    SupervisorHarness(tmp_path).script(f"import time\nopen({str(loads)!r}, 'w')\ntime.sleep(60)", "lib/slow.py")
    env = ENV | {"PYTHONPATH": str(tmp_path / "lib")}
    waiting = spare.Spare(tmp_path / "base", SupervisorOptions(preload=("slow",), env=env), print)
    base = tmp_path / "base"
    await until(loads.exists if moment == "imports" else lambda: base.exists() and any(base.iterdir()))
    before = psutil.Process().children()
    await waiting.close()
    assert [process for process in before if "slow" in _command(process)] == []
    assert list(base.iterdir()) == []


def _command(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return ""
