"""How well the throughput of jobs is predicted: numbers of loaders are measured after they were predicted."""

from __future__ import annotations

import asyncio
import contextlib
import statistics
import time
from dataclasses import dataclass

from benchmarks.sharing_job import BATCH
from benchmarks.sharing_mixes import NODE, SharingJob
from benchmarks.sharing_runs import SharedNode, read_batches

JOBS = (
    SharingJob("hungry", 100_000, 50, 400, 0, 2),
    SharingJob("light", 100_000, 100, 50, 0, 2),
    SharingJob("resnet", 100_000, 60, 200, 0, 2),
)
TRIED = (2, 5)
HELD_OUT = (1, 3, 4, 7)
TRIED_SECONDS = 6.0
MEASURED_SECONDS = 4.0
SETTLE_SECONDS = 1.0
"""After a resize, until what was loaded before it is used."""


@dataclass(frozen=True)
class Prediction:
    job: str
    loaders: int
    predicted: float
    """Samples/s."""
    measured: float
    """By the job itself."""

    @property
    def error(self) -> float:
        return abs(self.predicted / self.measured - 1)


async def predict_held_out(node: SharedNode) -> list[Prediction]:
    await node.client.set_schedule("off", budgets={NODE: 100})
    await node.ready()
    names = {job: f"predicted-{job.name}" for job in JOBS}
    folders = {job: await node.submit(name, job, TRIED[0]) for job, name in names.items()}
    for folder in folders.values():
        while not (folder / "batches").exists():
            await asyncio.sleep(0.1)
    await asyncio.sleep(TRIED_SECONDS)
    for loaders in TRIED[1:]:
        await _resize(node, names, loaders, TRIED_SECONDS)
    curves = {job: {each.loaders: each.predicted for each in (await node.client.predict(name)).curve}
              for job, name in names.items()}  # fmt: skip
    predictions = []
    for loaders in HELD_OUT:
        began = await _resize(node, names, loaders, MEASURED_SECONDS) + SETTLE_SECONDS
        for job, folder in folders.items():
            times = [batch.time for batch in read_batches(folder) if batch.time >= began]
            # Loaders that start together deliver together: the time is that of as many batches.
            cycle = statistics.fmean(later - first for first, later in zip(times, times[loaders:], strict=False))
            measured = BATCH * loaders / cycle
            predicted = curves[job].get(loaders, curves[job][max(curves[job])])
            predictions.append(Prediction(job.name, loaders, predicted, measured))
    for name in names.values():
        with contextlib.suppress(TimeoutError):
            await node.cancel(name)
    return predictions


async def _resize(node: SharedNode, names: dict[SharingJob, str], loaders: int, seconds: float) -> float:
    """When it had taken effect on all jobs, which then train for these seconds."""
    for name in names.values():
        await node.client.set(name, loaders=loaders)
    began = time.monotonic()
    await asyncio.sleep(seconds)
    return began
