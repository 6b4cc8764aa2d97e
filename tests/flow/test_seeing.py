"""The weaver sees training: who is there, on what, how it fares, and when it is gone."""

from __future__ import annotations

import signal
import sys
import time
from pathlib import Path

from tests.flow.plane import plane
from tests.flow.proxy import Proxy
from torchloom.messages import Done, Fail, No, RankDied, RankLost

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
        rank = await up.until_beating()
        view = await up.look()
        assert rank.devices == ("GPU-1",)
        assert rank.beat is not None
        assert rank.beat.loss is not None
        assert rank.beat.samples_per_second is not None
        assert [(job.job, job.phase, job.live) for job in view.jobs] == [("job", "running", 1)]
        assert [(seat.device, seat.replica) for seat in view.seats] == [("GPU-1", ("job", "hi"))]


async def test_a_killed_rank_is_lost_at_once_and_dead_after_the_grace(tmp_path: Path) -> None:
    async with plane(tmp_path / "s") as up:
        process = up.start_rank()
        await up.until_beating()
        process.kill()
        await up.until_presence("lost", seconds=2)
        (incident,) = await up.incidents()
        assert incident.subject == "job/hi/0"
        assert incident.closed is None
        await up.until_presence("dead")
        (incident,) = await up.incidents()
        assert incident.outcome == "presumed dead"


async def test_a_rank_with_live_loader_processes_is_lost_as_fast(tmp_path: Path) -> None:
    async with plane(tmp_path / "s") as up:
        process = up.start_script([sys.executable, "-c", TORCH_RANK])
        await up.until_beating()
        process.kill()
        # The two forked loaders live on for some seconds; had they kept the socket, so would the rank.
        await up.until_presence("lost", seconds=2)


async def test_a_clean_end_is_no_incident(tmp_path: Path) -> None:
    async with plane(tmp_path / "s") as up:
        script = "import torchloom; l = torchloom.attach(job='job', replica='hi'); [l.step() for _ in range(10)]\n"
        script += "import time; t = time.time()\nwhile not l.connected and time.time() - t < 10: time.sleep(0.01)"
        process = up.start_script([sys.executable, "-c", script])
        await up.until_presence("left")
        assert process.wait(10) == 0
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
        assert process.wait(10) == 1
        (incident,) = await up.incidents()
        assert any("the ninth batch is odd" in line for line in incident.evidence)


async def test_a_frozen_rank_is_lost_and_found_again(tmp_path: Path) -> None:
    async with plane(tmp_path / "s") as up:
        process = up.start_rank()
        await up.until_beating()
        process.send_signal(signal.SIGSTOP)
        lost = await up.until_presence("lost")
        assert "Stale" in lost.reason or "silent" in lost.reason
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


async def test_a_rank_id_used_twice_is_told_and_training_goes_on_in_both(tmp_path: Path) -> None:
    async with plane(tmp_path / "s") as up:
        first = up.start_rank()
        await up.until_beating()
        second = up.start_rank()
        incident = await up.until(up.incidents, what="an incident")
        assert "used twice" in incident[0].what
        rank = await up.until_beating()
        assert rank.pid == second.pid
        assert first.poll() is None
        assert second.poll() is None


async def test_loss_comes_long_before_any_heartbeat_could_tell(tmp_path: Path) -> None:
    async with plane(tmp_path / "s") as up:
        client = await up.client()
        entries = await client.subscribe("loom.log")
        await client.flush()
        process = up.start_rank()
        await up.until_beating()
        process.kill()
        killed = time.time()
        while True:
            message = await entries.next_msg(timeout=5)
            if b"RankLost" in message.data:
                break
        assert time.time() - killed < 1.0  # a beat's interval: only the server's word can be that early
