"""Where alerts are taken and with which token: what `loom` says of it is what Alertmanager needs."""

from __future__ import annotations

import json
import re
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.flow.agents import Cluster, cluster

FIRING = (Path(__file__).parent.parent / "fixtures" / "alertmanager_firing.json").read_bytes()


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with cluster(tmp_path_factory.mktemp("up")) as one:
        yield one


def shown(up: Cluster) -> str:
    found: list[str] = []

    def look() -> list[str]:
        found[:] = re.findall(r"alerts are taken at (\S+)", up.loom("status").stdout)
        return found

    up.until(look, "a place for alerts")
    return found[0]


def post(where: str, token: str) -> int:
    request = urllib.request.Request(where, FIRING, {"Authorization": f"Bearer {token}"})
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


def test_the_address_that_is_shown_takes_the_token_that_is_printed(up: Cluster) -> None:
    printed = up.loom("token", "ingress")
    assert printed.returncode == 0, printed.stderr
    where = shown(up)
    assert where in printed.stderr
    up.until(lambda: f", alerts at {where}, state in " in up.log(), "the same place")
    assert post(where, printed.stdout.strip()) == 200
    assert post(where, "another") == 401


def test_an_alert_about_a_device_that_is_not_known_is_counted(up: Cluster) -> None:
    post(shown(up), up.loom("token", "ingress").stdout.strip())
    up.until(lambda: json.loads(up.loom("status", "-o", "json").stdout)["plane"].get("refused"), "a count")
    assert json.loads(up.loom("devices", "-o", "json").stdout) == []


def test_the_doctor_says_where_alerts_are_taken(up: Cluster) -> None:
    checks = json.loads(up.loom("doctor", "-o", "json").stdout)["checks"]
    (found,) = [check for check in checks if check["check"] == "alerts"]
    assert found["level"] == "ok"
    assert shown(up) in found["found"]


def test_without_a_control_plane_there_is_no_token(up: Cluster, tmp_path: Path) -> None:
    none = up.loom("--state", str(tmp_path / "none"), "token", "ingress")
    assert none.returncode == 6
    assert none.stdout == ""
    assert "run this where `loom up` runs" in none.stderr


def test_it_may_be_closed_and_refuses_to_be_open_to_all(tmp_path: Path) -> None:
    with cluster(tmp_path, TORCHLOOM_INGRESS="0") as closed:
        assert "alerts" not in closed.loom("status").stdout
        closed.env["TORCHLOOM_INGRESS_HOST"] = "0.0.0.0"
        open_to_all = closed.loom("--state", str(tmp_path / "other"), "up", "--port", "0")
        assert open_to_all.returncode == 6
        assert "refusing to take alerts on 0.0.0.0 without TLS" in open_to_all.stderr
