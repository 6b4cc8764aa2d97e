"""Three jobs on two agents: the scheduler moves loaders while they train, and they end as they would alone."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from msgspec.structs import replace

from tests.flow.agents import Cluster, cluster, said
from tests.flow.test_workload_jobs import alone, losses
from torchloom import Client
from torchloom.core.scheduling.observation import SCHEDULER
from torchloom.protocol.job_spec import DeviceGroup, Task
from torchloom.protocol.records import ChangeDecided, ChangeProposed, RankJoined, RankLeft, Record
from torchloom.protocol.scheduling import LoadersAllocated, ScheduledJob

BUDGET = 4
MODULE = "torchloom.workloads.train"
COMMON = ("--arch", "small", "--depth", "2", "--scale", "0.1", "--classes", "4", "--checkpoint-every", "50")
WORDS = {
    "hungry": ("--batch", "16", "--workers", "4", "--sample-seconds", "0.01", "--end-iter", "1200"),
    "light": ("--batch", "4", "--workers", "4", "--sample-seconds", "0.001", "--end-iter", "400"),
    "late": ("--batch", "8", "--workers", "2", "--sample-seconds", "0.005", "--end-iter", "200"),
}
REQUESTED = {"hungry": 2, "light": 2, "late": 1}
"""Of each of their two ranks, one on each node."""
QUICK = ("--workers", "16")
"""Alone; the losses do not depend on it."""


def submit(up: Cluster, job: str) -> Task:
    args = [*COMMON, *WORDS[job], "--output-folder", f"kept-{job}"]
    (up.folder / f"{job}.toml").write_text(
        f'[[job]]\njob = "{job}"\nmodule = "{MODULE}"\nargs = {json.dumps(args)}\nstandby = false\n'
        f'checkpoint_dir = "kept-{job}/checkpoints"\ndevices = {{n1 = [0], n2 = [0]}}\n'
    )
    done = up.loom("submit", f"{job}.toml")
    assert done.returncode == 0, done.stderr
    groups = tuple(DeviceGroup(devices=(0,), node=node) for node in ("n1", "n2"))
    return Task(argv=("-m", MODULE, *args), groups=groups)


def kill_weaver(up: Cluster) -> None:
    """The one that `loom up` runs, and starts again."""
    children = psutil.Process(up.processes[0].pid).children(recursive=True)
    next(child for child in children if " weaver" in said(child)).kill()


def grown(records: list[Record]) -> Iterator[tuple[str, int]]:
    """Each move that is to give a job more loaders, and how many a node has with it in all."""
    jobs: dict[str, str] = {}
    """By change."""
    held: dict[str, int] = {}
    pending: dict[str, int] = {}
    for record in records:
        match record:
            case RankJoined(rank=rank):
                held.setdefault(rank.job, REQUESTED[rank.job])
            case RankLeft(rank=rank):
                held.pop(rank.job, None)
                pending.pop(rank.job, None)
            case ChangeProposed(change=change, job=job) if "loaders" in change.values:
                assert record.operator == SCHEDULER
                jobs[change.id], pending[job] = job, int(change.values["loaders"])  # type: ignore[arg-type]
                if pending[job] > held[job]:
                    yield job, sum(max(number, pending.get(other, 0)) for other, number in held.items())
            case ChangeDecided(id=id, commit=commit) if id in jobs and jobs[id] in held:
                number = pending.pop(jobs[id])
                held[jobs[id]] = number if commit else held[jobs[id]]


@pytest.mark.long
def test_loaders_move_while_jobs_train_and_the_losses_are_those_of_runs_alone(tmp_path: Path) -> None:
    with cluster(tmp_path) as up, Client(up.settings) as client:
        for node in ("n1", "n2"):
            up.start_agent(node, SLURM_CPUS_ON_NODE="2")
        client.set_schedule("ours", budgets={"n1": BUDGET, "n2": BUDGET})

        def seen(job: str) -> ScheduledJob | None:
            return next((each for each in client.schedule().jobs if each.job == job), None)

        def is_fed() -> bool:
            """A job that arrives now meets no move that would give another one more: what it brings is not foreseen."""
            hungry = seen("hungry")
            has_all = hungry is not None and (hungry.loaders, hungry.target) == (BUDGET, None)
            return has_all or is_over("hungry")

        def is_over(job: str) -> bool:
            return up.loom("wait", job, "--timeout", "0.1").returncode == 0

        tasks = {"hungry": submit(up, "hungry")}
        up.until(is_fed, "all loaders for the only job")
        tasks["light"] = submit(up, "light")
        up.until(lambda: any(job.target is not None for job in client.schedule().jobs), "a job is about to be resized")
        kill_weaver(up)
        up.until(lambda: is_over("light"), "light is done")
        up.until(is_fed, "all loaders for the job that is left")
        tasks["late"] = submit(up, "late")
        for job in WORDS:
            up.until(lambda job=job: up.loom("wait", job, "--timeout", "60").returncode == 0, f"{job} is done")
        records = up.records()
        moves = list(grown(records))
        assert moves
        assert [total for _, total in moves if total > BUDGET] == []
        assert any(isinstance(record, LoadersAllocated) and "arrival" in record.triggers for record in records)
        for job, task in tasks.items():
            quick = replace(task, argv=(*task.argv, *QUICK))
            assert losses(up.loom("logs", job).stdout) == alone(tmp_path / job, quick, up)
