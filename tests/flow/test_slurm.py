"""`srun loom agent` on a real Slurm of two nodes: a job in an allocation ends with it, and nothing stays behind."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.flow.agents import SCRIPT, Cluster, cluster, needs_nodes
from tests.flow.records import codes
from tests.flow.slurm import NoSlurm, Slurm, slurm
from torchloom.protocol.phrase import phrase

BATCH = Path(__file__).parent.parent.parent / "examples" / "slurm.sbatch"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    try:
        with slurm(tmp_path_factory.mktemp("slurm")) as one:
            yield one
    except NoSlurm as none:
        pytest.skip(str(none))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """With a script, and the file of a job of two nodes with one rank each."""
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "tmp").mkdir()
    write(tmp_path, args=[str(tmp_path), "100000"])
    return tmp_path


def write(folder: Path, **settings: Any) -> None:
    given = {"script": "train.py", "nnodes": 2, "standby": False} | settings
    (folder / "job.toml").write_text("".join(f"{key} = {json.dumps(value)}\n" for key, value in given.items()))


def begin(site: Slurm, folder: Path) -> str:
    """The batch script of the examples, once its ranks run."""
    number = site.submit("--nodes=2", str(BATCH), str(folder / "job.toml"), TMPDIR=str(folder / "tmp"))
    until(lambda: ranks(site.printed(number)) == {"0", "1"}, lambda: site.printed(number))
    return number


def ranks(text: str) -> set[str]:
    return set(re.findall(r"rank (\d) of 2 on node", text))


def until(what: Callable[[], Any], told: Callable[[], object], seconds: float = 120.0) -> None:
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end, told()
        time.sleep(0.1)


def nothing_is_left(site: Slurm, number: str, folder: Path) -> None:
    until(lambda: site.over(number), lambda: site.printed(number))
    until(lambda: not site.left(number), lambda: site.left(number))
    assert not list((folder / "tmp").iterdir())


@pytest.mark.long
@pytest.mark.parametrize(("how", "code"), [("finish", 0), ("fail", 7)])
def test_an_allocation_ends_when_the_job_is_over_with_its_exit_code(
    site: Slurm, folder: Path, how: str, code: int
) -> None:
    write(folder, args=[str(folder), "100000"], max_restarts=0)
    number = begin(site, folder)
    (folder / how).touch()
    (folder / "finish").touch()
    nothing_is_left(site, number, folder)
    shown = site.run("scontrol", "show", "job", number).stdout
    assert f"ExitCode={code}:0" in shown, site.printed(number)
    assert f"slurm-{number} is running: attempt 1 on n1, n2" in site.printed(number)


def test_a_cancelled_allocation_leaves_nothing_behind(site: Slurm, folder: Path) -> None:
    number = begin(site, folder)
    assert len(site.left(number)) > 6
    assert site.run("scancel", number).returncode == 0
    nothing_is_left(site, number, folder)


@pytest.fixture
def plane(tmp_path: Path) -> Iterator[Cluster]:
    """A control plane that was there before, and stays."""
    with cluster(tmp_path) as one:
        yield one


def allocate(site: Slurm, plane: Cluster) -> str:
    return site.submit(
        "--nodes=2", "--ntasks-per-node=1", "--wrap", "srun loom agent", TORCHLOOM_STATE=plane.env["TORCHLOOM_STATE"]
    )


def test_a_job_outlives_its_allocation_and_goes_on_in_the_next_one(site: Slurm, plane: Cluster) -> None:
    first = allocate(site, plane)
    kept = plane.folder / "kept"
    kept.mkdir()
    plane.submit(nnodes=2, checkpoint_dir=str(kept))
    plane.until(lambda: plane.trains(2), "two ranks")
    assert {view.node for view in plane.nodes()} == {"n1", "n2"}
    import torch

    torch.save({"step": 5}, kept / "checkpoint_step_5.pt")
    site.run("scancel", first)
    until(lambda: site.over(first), lambda: site.printed(first))
    until(lambda: not site.left(first), lambda: site.left(first))
    away = (phrase("room_leaving"), phrase("room_silent"))
    there = {needs_nodes(2, 1, n1=one, n2=other) for one in away for other in away}
    plane.until(lambda: plane.waits_for() in there, "a job that waits")
    second = allocate(site, plane)
    plane.until(lambda: plane.trains(2, attempt=1), "two ranks again")
    (plane.folder / "finish").touch()
    ended = plane.loom("wait", "mnist")
    assert ended.returncode == 0, ended.stderr
    assert "1 restart" in ended.stderr
    assert "node_is_leaving" in codes(*plane.records("mnist"))
    assert "from 5 attempt 1" in plane.loom("logs", "mnist").stdout
    site.run("scancel", second)


def test_what_a_killed_agent_ran_in_an_allocation_ends_with_it(site: Slurm, plane: Cluster) -> None:
    number = allocate(site, plane)
    plane.submit(nnodes=2)
    plane.until(lambda: plane.trains(2), "two ranks")
    plane.until(lambda: ranks_of(plane, "n1"), "one of them on n1")
    there = ranks_of(plane, "n1")
    os.kill(plane.agent("n1"), signal.SIGKILL)
    until(lambda: not any(psutil.pid_exists(pid) for pid in there), lambda: there)
    site.run("scancel", number)
    until(lambda: site.over(number), lambda: site.printed(number))
    until(lambda: not site.left(number), lambda: site.left(number))


def ranks_of(plane: Cluster, node: str) -> list[int]:
    beats = [view.beat for view in plane.nodes() if view.node == node]
    return [rank.pid for beat in beats for attempt in beat.attempts for rank in attempt.ranks]
