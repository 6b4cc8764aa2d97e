"""The weaver sees training: who is there, on what, how it fares, and when it is gone."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import psutil
import pytest

from tests.flow.plane import plane
from tests.flow.proxy import Proxy
from tests.flow.records import codes, of_incident
from torchloom.protocol.ids import RankId
from torchloom.protocol.operator import Done, Fail, No
from torchloom.protocol.records import About, IncidentAmended, IncidentOpened, RankDied, RankLost

CLOSED = "Client Closed"
"""As the server says it: nobody else knows that a link closed."""
TORCH_RANK = """
import torch, torchloom
from torch.utils.data import DataLoader, TensorDataset
loom = torchloom.attach(job="job", replica="hi")
data = DataLoader(TensorDataset(torch.zeros(100000, 1)), batch_size=1, num_workers=2)
for batch in data:
    torch.zeros(100).sum()
    loom.step(loss=torch.tensor(0.5), samples=1)
"""


async def test_a_rank_that_attaches_is_seen_with_its_device_step_and_loss(tmp_path: Path) -> None:
    async with plane(tmp_path / "s") as up:
        up.start_rank(devices="GPU-1")

        async def told() -> bool:
            rank = await up.until_beating()
            assert rank.devices == ("GPU-1",)
            return rank.beat is not None and None not in (rank.beat.loss, rank.beat.samples_per_second)

        await up.until(told, what="a beat that tells all")  # one that came early may know less
        view = await up.look()
        assert [(job.job, job.phase, job.live) for job in view.jobs] == [("job", "running", 1)]
        assert [(a.device, a.replica) for a in view.assignments] == [("GPU-1", ("job", "hi"))]


@pytest.mark.promise(3)
async def test_a_killed_rank_is_lost_at_once_and_dead_after_the_grace(tmp_path: Path) -> None:
    async with plane(tmp_path / "s") as up:
        process = up.start_rank()
        await up.until_beating()
        process.kill()
        assert (await up.until_lost()).reason == CLOSED
        await up.until_presence("dead")
        (incident,) = await up.incidents()
        assert incident.about == About(rank=RankId("job", "hi", 0))
        assert "rank_presumed_dead" in codes(*of_incident(await up.records(), incident.id))
        kinds = (RankLost, IncidentOpened, RankDied, IncidentAmended)
        told = [type(record) for record in await up.records() if isinstance(record, kinds)]
        assert told == list(kinds), "an incident is open while it may come back"
        assert incident.closed is not None
        assert incident.closed - incident.opened >= up.settings.grace_seconds - 0.5


async def test_a_rank_with_live_loader_processes_is_lost_as_fast(tmp_path: Path) -> None:
    async with plane(tmp_path / "s") as up:
        process = up.start_script([sys.executable, "-c", TORCH_RANK])
        await up.until_beating()
        loaders = psutil.Process(process.pid).children()
        assert len(loaders) == 2
        for loader in loaders:  # stopped, so that they live on; had they kept the socket, so would the rank
            loader.suspend()
        try:
            process.kill()
            assert (await up.until_lost()).reason == CLOSED
            assert all(loader.status() == psutil.STATUS_STOPPED for loader in loaders)
        finally:
            for loader in loaders:
                loader.kill()


async def test_a_clean_end_is_no_incident(tmp_path: Path) -> None:
    async with plane(tmp_path / "s") as up:
        script = "import torchloom; l = torchloom.attach(job='job', replica='hi'); [l.step() for _ in range(10)]\n"
        script += "import time\nwhile not l.connected: time.sleep(0.01)"
        process = up.start_script([sys.executable, "-c", script])
        await up.until_presence("left")
        assert process.wait(60) == 0
        await up.until(lambda: _phase(up, "finished"))
        assert await up.incidents() == []


async def _phase(up, phase):  # type: ignore[no-untyped-def]
    return [job for job in (await up.look()).jobs if job.phase == phase]


async def test_an_uncaught_exception_is_told_with_its_text(tmp_path: Path) -> None:
    async with plane(tmp_path / "s") as up:
        script = "import torchloom, time; l = torchloom.attach(job='job', replica='hi')\n"
        script += "while not l.connected: time.sleep(0.01)\nraise ValueError('the ninth batch is odd')"
        process = up.start_script([sys.executable, "-c", script])
        await up.until_presence("failed")
        assert process.wait(60) == 1
        (incident,) = await up.incidents()
        assert "the ninth batch is odd" in str(of_incident(await up.records(), incident.id))


async def test_a_frozen_rank_is_lost_and_found_again(tmp_path: Path) -> None:
    async with plane(tmp_path / "s") as up:
        process = up.start_rank()
        await up.until_beating()
        process.send_signal(signal.SIGSTOP)
        lost = await up.until_lost()
        assert "Stale" in str(lost.reason) or "rank_silent" in codes(lost.reason)
        process.send_signal(signal.SIGCONT)
        await up.until_beating(after=0)
        assert not [r for r in await up.records() if isinstance(r, RankDied)]
        assert all(i.closed for i in await up.incidents())


async def test_a_socket_reset_is_no_death(tmp_path: Path) -> None:
    async with plane(tmp_path / "s") as up:
        endpoint = up.server.folder.read_endpoint()
        assert endpoint
        async with Proxy(int(endpoint.url.rpartition(":")[2])) as proxy:
            creds = up.server.folder.creds("threadlet")
            up.start_rank(TORCHLOOM_ADDR=f"nats://127.0.0.1:{proxy.port}", TORCHLOOM_CREDS=str(creds))
            before = await up.until_beating()
            proxy.reset()
            after = await up.until_beating(after=before.beat.step if before.beat else 0)
            assert after.incarnation == before.incarnation
            records = await up.records()
        assert not [r for r in records if isinstance(r, RankDied)]
        assert len([r for r in records if isinstance(r, RankLost)]) <= 1


async def test_two_replicas_on_one_device_and_one_replica_on_two(tmp_path: Path) -> None:
    async with plane(tmp_path / "s") as up:
        up.start_rank("a", devices="GPU-1")
        up.start_rank("b", devices="GPU-1,GPU-2")
        await up.until_beating("a")
        await up.until_beating("b")
        shared = await up.ask(Fail(device="GPU-1", cause="XID 79"))
        alone = await up.ask(Fail(device="GPU-2"))
        unknown = await up.ask(Fail(device="GPU-3"))
        assert isinstance(shared, Done)
        assert isinstance(alone, Done)
        assert shared.replicas == (("job", "a"), ("job", "b"))
        assert alone.replicas == (("job", "b"),)
        assert isinstance(unknown, No)
        assert {d.device: d.health for d in (await up.look()).devices} == {"GPU-1": "failed", "GPU-2": "failed"}


@pytest.mark.promise(4)
async def test_a_rank_id_used_twice_is_told_and_training_goes_on_in_both(tmp_path: Path) -> None:
    async with plane(tmp_path / "s") as up:
        first = up.start_rank()
        await up.until_beating()
        second = up.start_rank()
        incident = await up.until(up.incidents, what="an incident")
        assert "rank_id_twice" in codes(*of_incident(await up.records(), incident[0].id))
        rank = await up.until_beating()
        assert rank.pid == second.pid
        assert first.poll() is None
        assert second.poll() is None


async def test_loss_comes_long_before_any_heartbeat_could_tell(tmp_path: Path) -> None:
    async with plane(tmp_path / "s", weaver=False) as up:
        up.env["TORCHLOOM_SILENCE_SECONDS"] = "3600"  # a beat that does not come is no news for an hour
        up.start_weaver()
        process = up.start_rank()
        await up.until_beating()
        process.kill()
        assert (await up.until_lost()).reason == CLOSED
