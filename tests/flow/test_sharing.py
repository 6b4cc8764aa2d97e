"""Jobs on one agent with two cores: they share them, arrive later, and give them back to each other."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.flow.agents import Cluster, cluster
from tests.flow.scripts import GLOO, trained
from torchloom.agent.port_and_checkpoint import free_port
from torchloom.bus.weaver_client import WeaverClient
from torchloom.cli.verbs.jobs import TIME_IS_UP
from torchloom.protocol.job_spec import DeviceGroup, Task
from torchloom.protocol.operator import Submit
from torchloom.protocol.run_records import AttemptReleased
from torchloom.protocol.subjects import Role

DELAY = 4.0


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with cluster(tmp_path_factory.mktemp("sharing")) as one:
        one.start_agent("n1", SLURM_CPUS_ON_NODE="2")
        yield one


def submit(up: Cluster, job: str, **settings: Any) -> Path:
    """Two ranks that train together; the folder they write into. A file `last` there ends them."""
    folder = up.folder / job
    folder.mkdir()
    (folder / "train.py").write_text(GLOO)
    given = {
        "script": "train.py",
        "args": [str(folder), "1000000"],
        "nproc_per_node": 2,
        "checkpoint_dir": str(folder / "kept"),
        "standby": False,
    }
    lines = [f"{key} = {json.dumps(value)}\n" for key, value in (given | settings).items()]
    (folder / f"{job}.toml").write_text("".join(lines))
    done = up.loom("submit", str(folder / f"{job}.toml"))
    assert done.returncode == 0, done.stderr
    return folder


def step(folder: Path) -> int:
    noted = folder / "step-0"
    return int(noted.read_text()) if noted.exists() else 0


def phase(up: Cluster, job: str) -> str:
    return next(run.phase for run in up._runs().runs if run.job == job)


def finish(up: Cluster, folder: Path) -> None:
    """End a job; what it has computed is what it would have computed alone."""
    (folder / "last").touch()
    ended = up.loom("wait", folder.name)
    assert ended.returncode == 0, ended.stderr + up.log()
    assert {(folder / f"end-{rank}").read_text() for rank in range(2)} == {trained(step(folder))}


def test_two_jobs_share_the_cores_of_an_agent_and_compute_the_same_as_alone(up: Cluster) -> None:
    first, second = (submit(up, job, share=True) for job in ("first", "second"))
    up.until(lambda: step(first) and step(second), "both train")
    (node,) = up.nodes()
    assert (node.used, node.beat.cores) == (4, 2)
    assert "4 of 2" in up.loom("nodes").stdout
    finish(up, first)
    finish(up, second)


def test_a_released_job_makes_room_and_continues_to_the_same_bits(up: Cluster) -> None:
    released = submit(up, "released")
    up.until(lambda: step(released) > 10, "it trains")
    other = submit(up, "other")
    assert phase(up, "other") == "submitted"
    paused = up.loom("pause", "released", "--release")
    assert paused.returncode == 0, paused.stderr
    up.until(lambda: phase(up, "released") == "released", "it is released")
    up.until(lambda: step(other) > 10, "the other one trains")
    finish(up, other)
    assert phase(up, "released") == "released"
    assert up.loom("resume", "released").returncode == 0
    (stopped,) = [record for record in up.records("released") if isinstance(record, AttemptReleased)]
    assert stopped.attempt == 1
    before = step(released)
    up.until(lambda: step(released) > before + 10, "it continues")
    finish(up, released)
    lives = [json.loads(line) for line in (released / "lives").read_text().splitlines()]
    assert {life["first"] > 0 for life in lives if life["attempt"] == 2} == {True}, "from its checkpoint"


def test_a_job_arrives_later_on_the_cores_it_names_at_the_port_it_names(up: Cluster) -> None:
    folder = up.folder / "later"
    folder.mkdir()
    (folder / "train.py").write_text(GLOO)
    port = free_port("127.0.0.1")
    task = Task(
        argv=(str(folder / "train.py"), str(folder), "20"),
        cwd=str(folder),
        standby=False,
        groups=(DeviceGroup(devices=(1, 0), node="n1"),),
        port=port,
        delay=DELAY,
    )

    async def ask() -> None:
        async with WeaverClient(up.settings, Role.OPERATOR, timeout=20, connect_timeout=20) as weaver:
            await weaver.ask(Submit(request="5" * 32, job="later", task=task), 20)

    asyncio.run(ask())
    assert next(run.waiting_code for run in up._runs().runs if run.job == "later") == "arrives_in"
    waited = up.loom("wait", "later", "--timeout", "0.5")
    assert waited.returncode == TIME_IS_UP
    ended = up.loom("wait", "later")
    assert ended.returncode == 0, ended.stderr + up.log()
    run = next(run for run in up._runs().runs if run.job == "later")
    assert DELAY <= run.arrived - run.submitted < DELAY + 5
    assert [place.slot for place in run.places] == [1, 0]
    assert run.goodput is not None
    assert run.goodput.elapsed == pytest.approx((run.notes[-1].ended or 0.0) - run.arrived, abs=0.1)
    assert {json.loads(line)["port"] for line in (folder / "lives").read_text().splitlines()} == {port}


pytestmark = pytest.mark.long
