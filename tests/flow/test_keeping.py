"""What becomes of a job's checkpoints is known to the control plane, and operators reach them; no torch needed."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.flow.plane import Plane, plane
from tests.flow.records import codes, of_incident
from tests.flow.test_steering import change
from tests.flow.test_surviving import restart_weaver
from torchloom.bus.weaver_client import WeaverClient
from torchloom.protocol.rank import CheckpointSaved
from torchloom.protocol.records import IncidentOpened
from torchloom.protocol.subjects import Role
from torchloom.protocol.views import CheckpointsView, IncidentView

KEEPER = """
import json, sys, threading, time
from pathlib import Path
import torchloom
from torchloom.checkpoints import threadlet_bridge
from torchloom.protocol.rank import Resumed, Saved, SaveFailed

replica, folder = sys.argv[1], Path(sys.argv[2])

class Keeper:
    every = 1_000_000
    def wanted(self, step):
        write("wanted", step)
        return f"{folder}/step-{step}"
    def wait(self, seconds=None):
        return True

def write(what, value):
    with (folder / replica).open("a") as file:
        print(json.dumps([what, value]), file=file, flush=True)

def talk():
    # What a test wants told, line by line in a file.
    done = 0
    while True:
        lines = (folder / f"{replica}.tell").read_text().splitlines() if (folder / f"{replica}.tell").exists() else []
        for line in lines[done:]:
            kind, fields = json.loads(line)
            side = threadlet_bridge.current_threadlet()
            news = {"Saved": Saved, "SaveFailed": SaveFailed, "Resumed": Resumed}[kind]
            side.tell(news(incarnation=side.incarnation, **fields))
            write("told", fields["step"])
            done += 1
        time.sleep(0.01)

keeper = Keeper()
threadlet_bridge.register_checkpoints(keeper)
loom = torchloom.attach(job="job", replica=replica, rank=0, world_size=1)
threading.Thread(target=talk, daemon=True).start()
every, step = keeper.every, 0
while not loom.stopping:
    time.sleep(0.01)
    step += 1
    loom.step()
    if keeper.every != every:
        every = keeper.every
        write("every", [every, step])
"""
"""A rank with checkpoints that write nothing, and tell what a test wants told."""


class Ranks:
    """Some such ranks, each a replica."""

    def __init__(self, up: Plane, folder: Path, *replicas: str) -> None:
        self.folder = folder
        self.replicas = replicas
        for replica in replicas:
            up.start_script([sys.executable, "-c", KEEPER, replica, str(folder)])

    def tell(self, replica: str, kind: str, **fields: Any) -> None:
        with (self.folder / f"{replica}.tell").open("a") as file:
            print(json.dumps([kind, fields]), file=file)

    def save(self, replica: str, step: int) -> None:
        self.tell(replica, "Saved", step=step, folder="/runs/a", size=1000, seconds=1.5, stall=0.25)

    def wrote(self, what: str) -> list[list[Any]]:
        """What each rank wrote about this."""
        return [list(self._lines(replica, what)) for replica in self.replicas]

    def _lines(self, replica: str, what: str) -> Iterator[Any]:
        path = self.folder / replica
        for line in path.read_text().splitlines() if path.exists() else []:
            kind, value = json.loads(line)
            if kind == what:
                yield value


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "r").mkdir()
    return tmp_path / "r"


async def seen(up: Plane) -> CheckpointsView:
    async with WeaverClient(up.settings, Role.VIEWER) as weaver:
        return await weaver.checkpoints("job")


async def until_saved(up: Plane, *steps: int) -> CheckpointsView:
    async def there() -> CheckpointsView | None:
        view = await seen(up)
        return view if [kept.step for kept in view.saved] == list(steps) else None

    return await up.until(there, what=f"steps {steps}")  # type: ignore[no-any-return]


async def incident(up: Plane, what: str) -> IncidentView:
    """The one that was opened with this code."""

    async def there() -> IncidentView | None:
        opened = {r.id for r in await up.records() if isinstance(r, IncidentOpened) and what in codes(r.what)}
        return next((one for one in await up.incidents() if one.id in opened), None)

    return await up.until(there, what=what)  # type: ignore[no-any-return]


async def test_what_a_rank_tells_of_its_checkpoints_can_be_looked_at_and_outlives_the_weaver(
    tmp_path: Path, folder: Path
) -> None:
    async with plane(tmp_path / "s") as up:
        ranks = Ranks(up, folder, "hi")
        rank = await up.until_beating("hi")
        assert await seen(up) == CheckpointsView(job="job")
        ranks.tell("hi", "Resumed", step=90, path="/runs/a/step-90", rejected={"step-95": "model.pt: 64 bytes differ"})
        ranks.save("hi", 100)
        ranks.tell("hi", "SaveFailed", step=200, folder="/runs/a", why="no space left on device")
        failing = await incident(up, "checkpoint_failed")
        assert failing.closed is None
        damaged = await incident(up, "checkpoints_damaged")
        assert damaged.closed is not None
        view = await until_saved(up, 100)
        assert (view.folder, view.node, view.failures) == ("/runs/a", rank.node, 1)
        assert (view.saved[0].size, view.saved[0].seconds, view.saved[0].stall) == (1000, 1.5, 0.25)
        assert view.failed
        assert view.failed.why == "no space left on device"
        assert view.resumed
        assert view.resumed.path == "/runs/a/step-90"

        await restart_weaver(up)
        assert await seen(up) == view
        ranks.save("hi", 300)
        await until_saved(up, 100, 300)
        mended = await incident(up, "checkpoint_failed")
        assert "later_checkpoint_written" in codes(*of_incident(await up.records(), mended.id))


async def test_an_operator_reaches_the_checkpoints_of_all_ranks_at_one_step(tmp_path: Path, folder: Path) -> None:
    async with plane(tmp_path / "s") as up:
        ranks = Ranks(up, folder, "a", "b", "c")
        for replica in ranks.replicas:
            await up.until_beating(replica)

        async def asked() -> bool:
            """By the command itself; until all have offered to save, it is refused."""
            loom = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "torchloom.cli.main", "checkpoint", "job", env=up.env,
                stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL,
            )  # fmt: skip
            return await loom.wait() == 0

        await up.until(asked, what="a checkpoint")
        wanted = ranks.wrote("wanted")
        assert len(wanted[0]) == 1
        assert wanted == [wanted[0]] * 3

        done = await change(up, checkpoint_interval=50)
        await up.until(lambda: all(ranks.wrote("every")), what="the interval")
        assert ranks.wrote("every") == [[[50, done.step]]] * 3


@pytest.mark.promise(5)
async def test_news_told_while_nats_is_down_arrive_when_it_is_back_and_once(tmp_path: Path, folder: Path) -> None:
    async with plane(tmp_path / "s") as up:
        ranks = Ranks(up, folder, "hi")
        await up.until_beating("hi")
        ranks.save("hi", 100)
        await until_saved(up, 100)
        up.kill_server()
        for step in (200, 300, 400):
            ranks.save("hi", step)
        await up.until(lambda: ranks.wrote("told") == [[100, 200, 300, 400]], what="all are told")
        up.server.start()
        await until_saved(up, 100, 200, 300, 400)
        ranks.save("hi", 500)
        await until_saved(up, 100, 200, 300, 400, 500)
        saved = [record.step for record in await up.records() if isinstance(record, CheckpointSaved)]
        assert saved == [100, 200, 300, 400, 500]
