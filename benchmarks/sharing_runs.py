"""A mix of jobs under one rule: a real agent starts them, and they write down what they have consumed.

Every job is submitted when it arrives, by the clock of this process. Who decides about loaders differs:

    static      nobody: each job is started with the budget divided by the number of jobs in the file
    even        the weaver, with its policy `even`
    requested   the weaver, with its policy `requested`
    ours        the weaver, with its policy `ours`
    torchloader this process: at each arrival and departure the rule says what each job gets, and a job whose number
                changes is stopped, and started again from its position
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import statistics
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from uuid import uuid4

from benchmarks.plane import ROOT, child, environment
from benchmarks.sharing_mixes import NODE, Mix, SharingJob, TorchloaderRule
from torchloom.bus.weaver_client import WeaverClient
from torchloom.client import AsyncClient
from torchloom.protocol.job_spec import Task
from torchloom.protocol.operator import Cancel, Submit
from torchloom.protocol.subjects import Role
from torchloom.settings import Settings
from torchloom.views.job_runs import are_over

RULES = ("static", "even", "requested", "torchloader", "ours")
POLL_SECONDS = 0.05
PATIENCE = 240.0
SETTLE_SECONDS = 2.0
"""After a resize, in which training must not be slower than before or after it."""


@dataclass(frozen=True)
class Batch:
    time: float
    """When training got it."""
    loaders: int
    indices: tuple[int, ...]


@dataclass(frozen=True)
class JobRecord:
    """What a job has written down."""

    job: SharingJob
    arrived: float
    finished: float
    batches: tuple[Batch, ...]
    restarts: tuple[float, ...] = ()
    """Seconds of each, from the command to stop until the next batch was used."""

    @property
    def span(self) -> float:
        return self.finished - self.arrived

    @property
    def start_seconds(self) -> float:
        return self.batches[0].time - self.arrived

    def lost_and_repeated(self) -> tuple[int, int]:
        counts = Counter(index for batch in self.batches for index in batch.indices)
        return self.job.samples - len(counts), sum(counts.values()) - len(counts)

    def paces(self) -> dict[int, float]:
        """Seconds between two batches, the mean at each number of loaders."""
        gaps: dict[int, list[float]] = {}
        for before, after in itertools.pairwise(self.batches):
            if before.loaders == after.loaders and after.time - before.time < SETTLE_SECONDS:
                gaps.setdefault(after.loaders, []).append(after.time - before.time)
        return {loaders: statistics.fmean(each) for loaders, each in gaps.items()}

    def resizes(self) -> list[tuple[float, int, int]]:
        pairs = itertools.pairwise(self.batches)
        return [(b.time, a.loaders, b.loaders) for a, b in pairs if a.loaders != b.loaders]

    def resize_seconds_lost(self) -> float:
        """In the moments after each resize, compared with the slower of the paces before and after it."""
        paces, lost = self.paces(), 0.0
        for at, before, after in self.resizes():
            times = [batch.time for batch in self.batches if at <= batch.time < at + SETTLE_SECONDS]
            slowest = max(paces.get(before, 0.0), paces.get(after, 0.0))
            lost += max(0.0, times[-1] - times[0] - slowest * (len(times) - 1))
        return lost


@dataclass(frozen=True)
class Run:
    rule: str
    jobs: tuple[JobRecord, ...]

    @property
    def throughput(self) -> float:
        return sum(each.job.samples / each.span for each in self.jobs)

    @property
    def makespan(self) -> float:
        return max(each.finished for each in self.jobs) - min(each.arrived for each in self.jobs)

    @property
    def mean_share(self) -> float:
        """T/G of a running job: Σ T/G over time, by the number of running jobs over time."""
        return sum(each.job.samples / each.job.ceiling for each in self.jobs) / sum(each.span for each in self.jobs)

    def excess(self, budget: int) -> float:
        """Loaders above the budget, times the seconds for which they were there."""
        moments = sorted(moment for number, each in enumerate(self.jobs) for moment in _holdings(number, each))
        held, excess = dict.fromkeys(range(len(self.jobs)), 0), 0.0
        for (at, number, loaders), (until, *_) in itertools.pairwise(moments):
            held[number] = loaders
            excess += max(0, sum(held.values()) - budget) * (until - at)
        return excess


def _holdings(number: int, record: JobRecord) -> Iterator[tuple[float, int, int]]:
    yield record.batches[0].time, number, record.batches[0].loaders
    yield from ((at, number, after) for at, _, after in record.resizes())
    yield record.finished, number, 0


@dataclass(eq=False)
class SharedNode:
    """A control plane and an agent, driven as users drive them."""

    settings: Settings
    weaver: WeaverClient
    client: AsyncClient
    folder: Path
    runs: int = 0

    async def submit(self, name: str, job: SharingJob, loaders: int) -> Path:
        folder = self.folder / name
        folder.mkdir(exist_ok=True)
        words = {
            "samples": job.samples,
            "sample-seconds": 1 / job.rate,
            "ceiling": job.ceiling,
            "loaders": loaders,
        }
        options = [word for key, value in words.items() for word in (f"--{key}", str(value))]
        task = Task(argv=("-m", "benchmarks.sharing_job", str(folder), *options), cwd=str(ROOT), share=True)
        await self.weaver.ask(Submit(request=uuid4().hex, job=name, task=task), PATIENCE)
        return folder

    async def ended(self, name: str) -> None:
        while not are_over((await self.weaver.runs(name)).runs):
            await asyncio.sleep(POLL_SECONDS)

    async def cancel(self, name: str) -> None:
        await self.weaver.ask(Cancel(request=uuid4().hex, job=name), PATIENCE)
        await self.ended(name)

    async def ready(self) -> None:
        """No job runs, and the agent has a process ready for the next."""
        while (await self.client.schedule()).jobs or not any(
            node.beat.standby_mb for node in await self.weaver.nodes()
        ):
            await asyncio.sleep(POLL_SECONDS)


@contextlib.asynccontextmanager
async def shared_node(settings: Settings, folder: Path, budget: int) -> AsyncIterator[SharedNode]:
    command = [sys.executable, "-P", "-m", "torchloom.cli.main", "--state", settings.state, "agent"]
    command += ["--name", NODE, "--loader-budget", str(budget), "--tied"]
    with (folder / "agent.log").open("wb") as log:
        env = environment(settings, PYTHONPATH=str(ROOT))
        with child(command, env, stdout=log, stderr=log):
            async with (
                WeaverClient(settings, Role.OPERATOR, patience=PATIENCE) as weaver,
                AsyncClient(settings) as client,
            ):
                node = SharedNode(settings, weaver, client, folder)
                await node.ready()
                yield node


@dataclass(eq=False)
class _Live:
    """A job from its arrival until it has finished."""

    node: SharedNode
    job: SharingJob
    name: str
    arrived: float = 0.0
    restarts: list[float] = field(default_factory=list)
    wanted: int = 0
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def folder(self) -> Path:
        return self.node.folder / self.name

    def want(self, loaders: int) -> None:
        """It is to be stopped, and started again with this number."""
        if loaders != self.wanted:
            self.wanted = loaders
            self._changed.set()

    async def run(self, loaders: int) -> JobRecord:
        self.arrived, self.wanted = time.monotonic(), loaders
        await self.node.submit(self.name, self.job, loaders)
        finished = self.folder / "finished"
        while not finished.exists():
            if time.monotonic() - self.arrived > PATIENCE:
                raise TimeoutError(f"{self.name} has not finished")
            if self._changed.is_set() and (self.folder / "batches").exists():
                self._changed.clear()
                await self._restart()
            await asyncio.sleep(POLL_SECONDS)
        return JobRecord(
            self.job, self.arrived, float(finished.read_text()), tuple(self._batches()), tuple(self.restarts)
        )

    async def _restart(self) -> None:
        began = time.monotonic()
        with contextlib.suppress(Exception):  # it may end meanwhile
            await self.node.client.stop(self.name)
        await self.node.ended(self.name)
        if (self.folder / "finished").exists():
            return
        stopped = float((self.folder / "stopped").read_text())
        before = len(self._batches())
        await self.node.submit(self.name, self.job, self.wanted)
        while len(self._batches()) == before:
            await asyncio.sleep(POLL_SECONDS)
        self.restarts.append(self._batches()[before].time - max(began, stopped))

    def _batches(self) -> list[Batch]:
        return read_batches(self.folder)


def read_batches(folder: Path) -> list[Batch]:
    """What a job has consumed so far."""
    lines = (folder / "batches").read_text().rpartition("\n")[0].splitlines()
    cells = [line.split() for line in lines]
    return [Batch(float(at), int(loaders), tuple(map(int, indices))) for at, loaders, *indices in cells]


async def run_mix(node: SharedNode, mix: Mix, rule: str) -> Run:
    await node.client.set_schedule(
        rule if rule in ("even", "requested", "ours") else "off",  # type: ignore[arg-type]
        objective="share",
        budgets={NODE: mix.budget},
    )
    await node.ready()
    node.runs += 1
    jobs = {job.name: _Live(node, job, f"{node.runs}-{rule}-{job.name}") for job in mix.jobs}
    torchloader = TorchloaderRule(mix.budget) if rule == "torchloader" else None
    began = time.monotonic()

    async def live(job: SharingJob) -> JobRecord:
        await asyncio.sleep(max(0.0, began + job.arrival - time.monotonic()))
        loaders = mix.budget // len(mix.jobs) if rule == "static" else job.requested
        if torchloader is not None:
            given = torchloader.arrive(job)
            _want(jobs, given, job)
            loaders = given[job.name]
        record = await jobs[job.name].run(loaders)
        if torchloader is not None:
            _want(jobs, torchloader.leave(job), job)
        return record

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(live(job)) for job in mix.jobs]
    return Run(rule, tuple(task.result() for task in tasks))


def _want(jobs: dict[str, _Live], given: dict[str, int], besides: SharingJob) -> None:
    for name, loaders in given.items():
        if name != besides.name:
            jobs[name].want(loaders)
