"""The verbs that steer, with a real weaver and real ranks: what is typed changes what trains."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import torchloom
from tests.cli.conftest import Loom, Ran
from tests.flow.plane import Plane, plane
from torchloom.errors import Refused

pytestmark = pytest.mark.long  # each test starts whole processes

TRAINING = """
import sys, time, torchloom
rank = int(sys.argv[1])
with torchloom.attach(job="job", replica="hi", rank=rank, world_size=2, devices=[f"GPU-{rank}"]) as loom:
    lr = loom.knob("lr", 0.1, low=0.0, high=1.0, help="step size")
    loom.on_checkpoint(lambda step: f"/ckpt/{step}")
    while not loom.stopping:
        time.sleep(0.01)
        loom.step(loss=1.0, lr=lr.value)
"""


@pytest.fixture
def ask(loom: Loom, tmp_path: Path) -> Callable[..., asyncio.Future[Ran]]:
    """Type a command while the plane's own tasks go on."""
    return lambda *words: asyncio.to_thread(loom, "--state", str(tmp_path / "s"), *words)  # type: ignore[return-value]


async def train(up: Plane) -> None:
    for rank in (0, 1):
        up.start_script([sys.executable, "-c", TRAINING, str(rank)])
    for rank in (0, 1):
        await up.until_beating("hi", rank, after=5)


async def test_a_change_from_the_command_line(tmp_path: Path, ask: Callable[..., asyncio.Future[Ran]]) -> None:
    async with plane(tmp_path / "s") as up:
        await train(up)
        assert "lr" in (await ask("knobs", "job")).out
        ran = await ask("set", "job", "lr=0.25", "-o", "json")
        assert ran.code == 0, ran.err
        done = json.loads(ran.out)
        assert "on 2 ranks" in done["text"]

        async def taken() -> bool:
            found = [await up.rank("hi", rank) for rank in (0, 1)]
            return all(rank and rank.beat and rank.beat.metrics.get("lr") == 0.25 for rank in found)

        await up.until(taken, what="both ranks train with it")
        assert "lr 0.1 → 0.25" in (await ask("changes", "job")).out
        assert "asked by" in (await ask("events", "--job", "job")).out
        assert (await ask("revert", "job", done["change"])).code == 0
        assert (await ask("revert", "job", done["change"])).code == 4
        async with torchloom.AsyncClient(up.settings, timeout=60) as loom:
            with pytest.raises(Refused) as refused:
                await loom.revert("job", done["change"])
        assert refused.value.code == "reverted_already"
        shown = json.loads((await ask("changes", "job", "-o", "json")).out)
        assert shown[1]["reverted_by"] == shown[0]["id"]


async def test_commands_from_the_command_line(tmp_path: Path, ask: Callable[..., asyncio.Future[Ran]]) -> None:
    async with plane(tmp_path / "s") as up:
        await train(up)
        assert "/ckpt/" in (await ask("checkpoint", "job")).out
        assert "in <module>" in (await ask("stacks", "job")).out
        assert (await ask("pause", "job/hi/0")).code == 4
        async with torchloom.AsyncClient(up.settings, timeout=60) as loom:
            with pytest.raises(Refused) as refused:
                await loom.pause("job/hi/0")
        assert refused.value.code == "rank_not_alone"
        assert (await ask("pause", "job")).code == 0
        await up.until(lambda: _shows(ask, "paused"), what="it is shown as paused")
        assert (await ask("resume", "job")).code == 0
        asked = await ask("stop", "job")
        assert asked.code == 2
        assert "this will stop job: 2 ranks, at step" in asked.err
        assert (await ask("stop", "job", "--yes")).code == 0
        assert [await asyncio.to_thread(rank.wait, 60) for rank in up.ranks] == [0, 0]


async def _shows(ask: Callable[..., asyncio.Future[Ran]], word: str) -> bool:
    return word in (await ask("status")).out


async def test_a_change_outlives_the_weaver_it_was_asked_of(tmp_path: Path) -> None:
    async with plane(tmp_path / "s") as up, torchloom.AsyncClient(up.settings, timeout=60) as loom:
        await train(up)
        assert up.weaver
        up.weaver.kill()
        up.weaver.wait()
        asking = asyncio.create_task(loom.set("job", lr=0.5))
        await asyncio.sleep(1)
        up.start_weaver()
        done = await asyncio.wait_for(asking, 90)
        assert done.step
        assert [change.values for change in await loom.changes("job")] == [{"lr": 0.5}]


async def test_a_device_that_training_uses_is_listed_and_so_is_its_failure(
    tmp_path: Path, ask: Callable[..., asyncio.Future[Ran]]
) -> None:
    async with plane(tmp_path / "s") as up:
        await train(up)
        listed = json.loads((await ask("devices", "-o", "json")).out)
        assert {row["device"]: row["health"] for row in listed} == {"GPU-0": "ok", "GPU-1": "ok"}
        assert (await ask("fail", "GPU-1", "--cause", "XID 79")).code == 0
        assert "XID 79" in (await ask("devices")).out
