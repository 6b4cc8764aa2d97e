"""`loom agent --tied`: what it runs ends with it, in order if it is asked to end, and at once if it is killed."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.flow.agents import Cluster, cluster, needs_nodes
from torchloom.protocol.phrase import phrase


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Cluster]:
    with cluster(tmp_path) as one:
        yield one


def start(site: Cluster) -> subprocess.Popen[bytes]:
    agent = site.start("agent", "--standby", "0", "--name", "n1", "--tied")
    site.until(lambda: site.agent("n1") == agent.pid, "an agent")
    return agent


@pytest.mark.wording
def test_an_agent_that_is_asked_to_end_takes_its_ranks_along_and_the_job_waits_for_the_next_one(site: Cluster) -> None:
    agent = start(site)
    site.submit(nproc_per_node=2)
    site.until(lambda: site.trains(2), "two ranks")
    family = psutil.Process(agent.pid).children(recursive=True)
    assert len(family) == 3, "a supervisor and two ranks"
    agent.send_signal(signal.SIGTERM)
    assert agent.wait(60) == 0
    _, alive = psutil.wait_procs(family, timeout=60)
    assert not alive
    assert "2 ranks ended with it" in site.log()
    there = needs_nodes(1, 2, n1=phrase("room_leaving"))
    site.until(lambda: site.waits_for() == there, "a job that waits")
    start(site)
    site.until(lambda: site.trains(2, attempt=1), "two ranks again")


def test_nothing_outlives_one_that_is_killed(site: Cluster) -> None:
    agent = start(site)
    site.submit(nproc_per_node=2)
    site.until(lambda: site.trains(2), "two ranks")
    family = psutil.Process(agent.pid).children(recursive=True)
    agent.kill()
    _, alive = psutil.wait_procs(family, timeout=60)
    assert not alive
