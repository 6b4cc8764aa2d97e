"""`loom check-node` and jobs that ask for a check, with real agents."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.flow.agents import LOOM, cluster, needs_nodes
from torchloom.protocol.phrase import Phrase, Prose, phrase
from torchloom.protocol.records import About, IncidentOpened


@pytest.mark.timeout(300)
def test_without_a_control_plane_this_machine_is_looked_at(tmp_path: Path) -> None:
    env = {k: v for k, v in os.environ.items() if not k.startswith("TORCHLOOM_")}
    env["TORCHLOOM_STATE"] = str(tmp_path)
    done = subprocess.run(
        [*LOOM, "check-node", "--checkpoint-dir", "/proc/nothing"], env=env, capture_output=True, text=True, timeout=250
    )
    assert done.returncode == 1
    assert "checkpoint folder" in done.stdout
    assert "  → " in done.stdout
    assert "clock" not in done.stdout


@pytest.mark.timeout(300)
@pytest.mark.long
@pytest.mark.wording
def test_nodes_are_looked_at_and_the_network_between_them(tmp_path: Path) -> None:
    with cluster(tmp_path) as site:
        site.start_agent("n1")
        site.start_agent("n2")
        done = site.loom("check-node", "n1", "n2", "-o", "json")
        assert done.returncode == 0, done.stdout + done.stderr
        found = json.loads(done.stdout)
        checks = {node["node"]: {check["what"]: check for check in node["checks"]} for node in found["nodes"]}
        assert checks["n1"]["clock"]["found"] == checks["n2"]["clock"]["found"] == "as the weaver's"
        assert "MB/s (gloo)" in checks["n2"]["network to n1"]["found"]
        assert site.loom("check-node", "n3").returncode == 4


@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_job_waits_where_no_node_is_fit_and_says_why(tmp_path: Path) -> None:
    with cluster(tmp_path) as site:
        site.start_agent("n1")
        site.submit(check=True, nproc_per_node=1, checkpoint_dir="/proc/nothing")

        def unfit() -> list[Prose]:
            """What the first check that failed found."""
            opened = [record for record in site.records() if isinstance(record, IncidentOpened)]
            return [record.evidence[0] for record in opened if record.about == About(node="n1", part="fitness")]

        site.until(unfit, "a node that is not fit")
        (why,) = unfit()
        assert isinstance(why, Phrase)
        assert (why.code, why.args["what"]) == ("check_not_passed", "checkpoint folder")
        there = needs_nodes(1, 1, n1=phrase("room_not_fit", why=why))
        site.until(lambda: site.waits_for() == there, "a job that waits")
        told = json.loads(site.loom("incidents", "-o", "json").stdout)
        assert ("n1", "fitness") in [(i["about"]["node"], i["about"]["part"]) for i in told]
        assert "not fit" in site.loom("nodes").stdout
        assert site.loom("cancel", "mnist", "--yes").returncode == 0
        site.submit(check=True, nproc_per_node=1, checkpoint_dir="kept")
        site.until(lambda: site.trains(1), "a rank")
