"""What `loom doctor` says of torchft: versions, and whether each timeout is longer than the ones that it contains."""

from __future__ import annotations

import json
from importlib import metadata
from pathlib import Path

import pytest

from tests.cli.conftest import Loom
from torchloom.cli.doctor_checks import VARIABLES, Finding, examine_torchft, waits
from torchloom.core.torchft.replica_groups import timeouts
from torchloom.protocol.job_spec import Torchft

FT = Torchft(replicas=2)


def levels(environ: dict[str, str], ft: Torchft = FT) -> dict[str, list[Finding]]:
    found: dict[str, list[Finding]] = {"ok": [], "warn": [], "fail": []}
    for finding in waits(ft, environ):
        found[finding.level].append(finding)
    return found


def test_what_torchloom_sets_is_in_order_the_shortest_first() -> None:
    found = list(waits(FT, {}))
    assert {finding.level for finding in found} == {"ok"}
    seconds = [float(finding.found.partition(" s: ")[0]) for finding in found]
    assert seconds == sorted(seconds)
    assert seconds[:3] == [0.1, FT.heartbeat_timeout, FT.join_timeout]
    assert len(found) == 3 + len(VARIABLES)


def test_every_time_that_torchloom_sets_is_told() -> None:
    assert set(VARIABLES) == {name for name in timeouts(FT) if name.endswith("_SEC")}


@pytest.mark.parametrize("name", ["TORCHFT_TIMEOUT_SEC", "TORCHFT_QUORUM_TIMEOUT_SEC"])
def test_a_variable_that_is_shorter_than_what_it_waits_for_is_told(name: str) -> None:
    (finding,) = levels({name: "10"})["warn"]
    assert f"{name} is not longer than joining (10 s: a quorum," in finding.found
    assert finding.remedy == f"unset {name}, or make it more than 10"
    assert levels({name: "11"})["warn"] == []


def test_a_variable_that_waits_for_nobody_may_be_short() -> None:
    assert levels({"TORCHFT_CONNECT_TIMEOUT_SEC": "1"})["warn"] == []


def test_a_variable_that_is_no_number_is_told() -> None:
    (finding,) = levels({"TORCHFT_TIMEOUT_SEC": "soon"})["warn"]
    assert finding.found == "TORCHFT_TIMEOUT_SEC=soon is no number of seconds"


def test_a_lighthouse_that_is_less_patient_than_replicas_beat_is_told() -> None:
    (finding,) = levels({}, Torchft(replicas=2, heartbeat_timeout=0.1, join_timeout=1.0))["warn"]
    assert "silence is not longer than heartbeats" in finding.found


def test_doctor_says_so(loom: Loom, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torchft", reason="torchft is not installed (its wheel is for Linux on x86_64 alone)")
    monkeypatch.setenv("TORCHFT_TIMEOUT_SEC", "1")
    ran = loom("--state", str(tmp_path / "none"), "doctor", "-o", "json")
    checks = json.loads(ran.out)["checks"]
    assert {"check": "torchft", "level": "ok", "found": metadata.version("torchft"), "remedy": ""} in checks
    told = [check for check in checks if check["check"] == "torchft waits" and check["level"] == "warn"]
    assert len(told) == 1
    assert [finding.check for finding in examine_torchft({})][:2] == ["torchft", "grpcio"]
