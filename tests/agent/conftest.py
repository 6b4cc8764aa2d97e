"""Supervisors that harness for a whole session, so that torch is imported once; each test comes as a new agent.

And GPUs that a test makes up.
"""

from __future__ import annotations

import asyncio
import ctypes
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pynvml
import pytest

from tests.agent.harness import ENV, SupervisorHarness
from tests.agent.nvml.fake import A, B, FakeDriver, build
from torchloom.agent.monitor import gpu_readings
from torchloom.agent.supervisor.supervisor_client import SupervisorOptions


def _standing(folder: Path, *preload: str) -> Iterator[Path]:
    starter = SupervisorHarness(folder.parent)
    env = ENV | {"MASTER_ADDR": "known to the supervisor, and not to its ranks"}

    async def start() -> None:
        await starter.start(folder, SupervisorOptions(tied=True, preload=preload, env=env, cwd=str(folder.parent)))
        starter.link.close()  # it dies with pytest, but not with its first agent

    async def dismiss() -> None:
        ender = SupervisorHarness(folder.parent)
        await ender.find(folder)
        await ender.link.dismiss()

    asyncio.run(start())
    yield folder
    asyncio.run(dismiss())
    assert starter.link.process
    assert starter.link.process.wait() == 0


@pytest.fixture(scope="session")
def light_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A supervisor that can fork ranks, but has imported nothing large."""
    yield from _standing(tmp_path_factory.mktemp("light") / "supervisor", "multiprocessing.spawn")


@pytest.fixture(scope="session")
def torch_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A supervisor that has imported torch."""
    yield from _standing(tmp_path_factory.mktemp("torch") / "supervisor", "torch", "numpy.random")


async def _found(folder: Path, home: Path) -> AsyncIterator[SupervisorHarness]:
    harness = SupervisorHarness(home)
    await harness.find(folder)
    state = await harness.link.settled()
    assert state.why_cold == ""
    yield harness
    assert not harness.gone
    for key in harness.ends:
        harness.link.forget(key)
    harness.link.close()


@pytest.fixture
async def light(light_folder: Path, tmp_path: Path) -> AsyncIterator[SupervisorHarness]:
    async for harness in _found(light_folder, tmp_path):
        yield harness


@pytest.fixture
async def torch_harness(torch_folder: Path, tmp_path: Path) -> AsyncIterator[SupervisorHarness]:
    async for harness in _found(torch_folder, tmp_path):
        yield harness


@pytest.fixture
async def harness(tmp_path: Path) -> AsyncIterator[SupervisorHarness]:
    """A tied supervisor of the test's own, with nothing preloaded."""
    harness = SupervisorHarness(tmp_path)
    await harness.start(tmp_path / "supervisor", SupervisorOptions(tied=True, env=ENV))
    yield harness
    await harness.link.dismiss()


@pytest.fixture
async def standing(tmp_path: Path) -> AsyncIterator[SupervisorHarness]:
    """The same, which outlives its agent."""
    harness = SupervisorHarness(tmp_path)
    await harness.start(tmp_path / "supervisor", SupervisorOptions(env=ENV))
    yield harness
    assert harness.link.process
    harness.link.process.kill()
    harness.link.process.wait()
    harness.link.close()


@pytest.fixture(scope="session")
def nvml_library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """Loaded under its own name, so that it is what pynvml finds. Without FAKE_NVML it says that there is no driver."""
    loaded = ctypes.CDLL(str(build(tmp_path_factory.mktemp("nvml"))))
    if pynvml.nvmlLib is not None and pynvml.nvmlLib._handle != loaded._handle:
        pytest.skip("a real driver is in use in this process")
    return loaded


@pytest.fixture
def driver(nvml_library: ctypes.CDLL, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    """Two GPUs that are well, read without a pause."""
    monkeypatch.setenv("FAKE_NVML", str(tmp_path / "nvml.txt"))
    monkeypatch.setattr(gpu_readings, "READ_SECONDS", 0.005)
    monkeypatch.setattr(gpu_readings, "WAIT_MS", 20)
    return FakeDriver(tmp_path / "nvml.txt", A, B)
