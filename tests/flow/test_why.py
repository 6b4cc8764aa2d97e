"""`loom why` on a real job: a rank is killed, and the story of it survives the weaver."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

from tests.flow.agents import Cluster, cluster
from tests.flow.records import KILLED, of_incident, phrases


def weaver_of(site: Cluster) -> int:
    said = site.loom("status", "-o", "json").stdout
    return int(json.loads(said)["plane"]["weaver"].rpartition(":")[2]) if said else 0


def why(site: Cluster, name: str) -> dict[str, Any]:
    told = site.loom("why", name, "-o", "json")
    assert told.returncode == 0, told.stderr
    found: dict[str, Any] = json.loads(told.stdout)
    return found


def test_the_story_of_a_killed_rank_survives_the_weaver(tmp_path: Path) -> None:
    with cluster(tmp_path) as site:
        site.start_agent("n1")
        site.submit(nproc_per_node=2, policy={"hang": "report", "straggler": "stacks"})
        site.until(lambda: site.trains(2), "the first attempt")
        os.kill(site.pid(1), signal.SIGKILL)
        site.until(lambda: site.trains(2, attempt=1), "the second attempt")
        site.until(lambda: why(site, "mnist")["incident"]["closed"] is not None, "the end of the incident")
        before = why(site, "mnist")
        assert before["incident"]["kind"] == "crash"
        told = of_incident(site.records(), before["incident"]["id"])
        assert KILLED in phrases(*told)
        assert ("started_again_from_beginning", {"attempt": 2}) in phrases(told[-1])
        assert len(before["incident"]["history"]) > len(told)  # also what the records of the run tell
        assert before["incident"]["lost_seconds"] > 0
        assert {"crash", "starting"} <= set(before["goodput"]["lost"])

        old = weaver_of(site)
        os.kill(old, signal.SIGKILL)
        site.until(lambda: weaver_of(site) not in {0, old}, "another weaver")
        after = why(site, "mnist")
        assert after["incident"] == before["incident"]
        spent = after["goodput"]
        assert abs(spent["productive"] + sum(spent["lost"].values()) - spent["elapsed"]) < 1e-6
        assert spent["elapsed"] > before["goodput"]["elapsed"]
        assert before["incident"]["id"] in site.loom("why", before["incident"]["id"]).stdout
        own = [
            rule["rule"]
            for rule in json.loads(site.loom("policy", "mnist", "-o", "json").stdout)["rules"]
            if rule["own"]
        ]
        assert own == ["hang=report", "straggler=stacks"]
