"""The batch size and the loaders of a running group are changed: at one step, with every sample used once."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.flow.plane import Plane, plane
from tests.flow.test_steering import ask, request
from torchloom.protocol.ids import RankId
from torchloom.protocol.operator import Done, No, SetKnobs
from torchloom.protocol.records import ChangeDecided
from torchloom.protocol.views import IncidentView

SCRIPT = """
import json, os, sys, time
from pathlib import Path
import torch, torch.distributed as dist
from torch.utils.data import DistributedSampler, TensorDataset
import torchloom
from torchloom.data import ElasticLoader

folder, rank = Path(sys.argv[1]), int(os.environ["RANK"])
os.environ["GLOO_SOCKET_IFNAME"] = "lo"
dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
loom = torchloom.attach(job="job", replica="hi")
data = TensorDataset(torch.arange(4000.0).reshape(4000, 1))
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1, 1))
optimizer = torch.optim.SGD(model.parameters(), 1e-9)
sampler = DistributedSampler(data)
ahead = 1 + 3 * rank  # one of them loads further ahead
loader = ElasticLoader(data, batch_size=4, sampler=sampler, num_workers=1, prefetch_factor=ahead)
loom.watch(loader)
loom.watch(optimizer)
accumulation = loom.accumulation(1)
batches = iter(loader)
if rank == 1 and "uneven" in sys.argv:
    next(batches)
log = (folder / f"rank{rank}").open("w", buffering=1)
seen = []
for number, (batch,) in enumerate(batches, start=1):
    optimizer.zero_grad()
    model(batch).mean().backward()
    optimizer.step()
    seen += batch.flatten().int().tolist()
    time.sleep(0.01)
    loom.step(samples=len(batch))
    log.write(json.dumps([number, len(batch), loader.num_workers, accumulation.value, len(loader)]) + chr(10))
    if loom.stopping:
        break
log.write(json.dumps(seen) + chr(10))
loom.close()
"""


def start(up: Plane, folder: Path, *words: str) -> list[Any]:
    script = folder / "train.py"
    script.write_text(SCRIPT)
    command = [sys.executable, str(script), str(folder), *words]
    return [up.start_script(command, RANK=str(rank), WORLD_SIZE="2") for rank in range(2)]


async def until_training(up: Plane) -> None:
    for rank in range(2):
        await up.until_beating("hi", rank)


async def test_a_batch_size_is_changed_before_the_same_batch_on_all_ranks(tmp_path: Path) -> None:
    async with plane(tmp_path / "s") as up:
        ranks = start(up, tmp_path)
        await until_training(up)
        wanted = SetKnobs(request=request(), job="job", values={"batch_size": 2}, keep_global_batch=True)
        smaller = await ask(up, wanted)
        assert isinstance(smaller, Done), smaller
        grown = await ask(up, SetKnobs(request=request(), job="job", values={"loaders": 3}))
        assert isinstance(grown, Done), grown
        larger = await ask(up, SetKnobs(request=request(), job="job", values={"batch_size": 50}))
        assert isinstance(larger, Done), larger
        assert [await asyncio.to_thread(rank.wait) for rank in ranks] == [0, 0]
    used = []
    for rank in range(2):
        lines = [json.loads(line) for line in (tmp_path / f"rank{rank}").read_text().splitlines()]
        steps, seen = lines[:-1], lines[-1]
        used += seen
        sizes = [size for _, size, *_ in steps]
        first, second = smaller.step or 0, larger.step or 0
        assert sizes[:first] == [4] * first
        assert sizes[first:second] == [2] * (second - first)
        assert set(sizes[second:-1]) == {50}
        assert [accumulation for *_, accumulation, _ in steps[first - 1 : first]] == [2], "with it, at the same step"
        assert [loaders for *_, loaders, _, _ in steps[(grown.step or 0) - 1 :]][:1] == [3]
        assert steps[-1][-1] == len(steps), "the length of the epoch, as it became"
    assert sorted(used) == list(range(4000)), "each sample once"


async def test_a_loader_that_is_killed_is_an_incident(tmp_path: Path) -> None:
    async with plane(tmp_path / "s") as up:
        first, _ = start(up, tmp_path)
        await until_training(up)
        zygote = psutil.Process(first.pid).children()[0]
        loader = zygote.children()[0]
        loader.kill()
        incident = await up.until(lambda: _find(up, "loader_died"), what="the incident")
        assert incident.about.rank == RankId("job", "hi", 0)
        view = await up.until_beating("hi", 0)
        assert view.beat is not None
        assert view.beat.loading is not None
        assert view.beat.loading.deaths == 1
        assert view.beat.loading.trouble is not None
        assert view.beat.loading.trouble.pid == loader.pid


async def _find(up: Plane, kind: str) -> IncidentView | None:
    return next((incident for incident in await up.incidents() if incident.kind == kind), None)


async def test_ranks_whose_loaders_are_at_different_places_refuse(tmp_path: Path) -> None:
    async with plane(tmp_path / "s") as up:
        start(up, tmp_path, "uneven")
        await until_training(up)
        answer = await ask(up, SetKnobs(request=request(), job="job", values={"batch_size": 2}))
        assert isinstance(answer, No), answer
        decided = [record.abort for record in await up.records() if isinstance(record, ChangeDecided)]
        assert [abort and abort.why for abort in decided] == ["unequal"]
        assert isinstance(await ask(up, SetKnobs(request=request(), job="job", values={"loaders": 2})), Done)


pytestmark = pytest.mark.long
