"""From an error that a driver tells of to the jobs that are placed: real agents and a real weaver, made-up GPUs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.agent.nvml.fake import A, B, FakeDriver, build
from tests.flow.agents import Cluster, cluster, needs_nodes
from torchloom.agent.monitor.gpu_health import describe
from torchloom.agent.monitor.pressure import read_pressure
from torchloom.protocol.phrase import phrase
from torchloom.protocol.records import DeviceMarkedFailed

LOST = 15
"""NVML_ERROR_GPU_IS_LOST."""


class Machine:
    """A node with two GPUs, and what the command line says of them."""

    def __init__(self, site: Cluster, folder: Path) -> None:
        self.site = site
        self.driver = FakeDriver(folder / "nvml.txt", A, B)
        site.start_agent("n1", LD_LIBRARY_PATH=str(build(folder).parent), FAKE_NVML=str(self.driver.path))
        site.until(lambda: all(device.get("reading") for device in self.devices().values()), "readings")

    def loom(self, *words: str) -> Any:
        done = self.site.loom(*words, "-o", "json")
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    def devices(self) -> dict[str, Any]:
        return {device["device"]: device for device in self.loom("devices")}

    def incidents(self, *words: str) -> list[tuple[str, str]]:
        return [(incident["kind"], incident["about"]["device"]) for incident in self.loom("incidents", *words)]


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    with cluster(tmp_path) as site:
        yield Machine(site, tmp_path)


def test_a_gpu_that_tells_of_a_fatal_error_gets_no_ranks_until_a_person_says_that_it_works(machine: Machine) -> None:
    site, driver = machine.site, machine.driver
    shown = site.loom("devices").stdout.splitlines()
    assert "97 %  40.0/80 GB  65 °C" in shown[1]
    (node,) = machine.loom("nodes")
    assert [reading["device"] for reading in node["beat"]["readings"]] == [A, B]
    assert ("pressure" in node["beat"]) == (read_pressure() is not None)

    driver.xid(A, 79)
    site.until(lambda: machine.devices()[A]["health"] == "failed", "a failed device")
    (failed,) = [record for record in site.records() if isinstance(record, DeviceMarkedFailed)]
    assert failed.cause == describe(79)
    assert machine.devices()[B]["health"] == "ok"
    driver.set(A, error=LOST)  # as it goes on: the same is told in another way, and then again
    driver.xid(A, 79)
    site.until(lambda: not machine.devices()[A].get("reading"), "no reading")
    assert machine.incidents() == [("device", A)]

    site.submit(nproc_per_node=2)
    there = needs_nodes(1, 2, n1=phrase("room_free", free=1, count=2, failed=1))
    site.until(lambda: site.waits_for() == there, "a job that waits")
    driver.set(A, error=None)
    assert site.loom("recover", A).returncode == 0
    site.until(lambda: site.trains(2), "two ranks")
    assert machine.incidents("--open") == []
    assert {device: view["health"] for device, view in machine.devices().items()} == {A: "ok", B: "ok"}
    both = [[{"job": "mnist", "replica": "main"}]] * 2
    site.until(lambda: [view.get("replicas") for view in machine.devices().values()] == both, "a replica on both")
    (site.folder / "finish").touch()
    assert site.loom("wait", "mnist").returncode == 0


def test_a_gpu_that_is_hot_is_warned_about_while_it_is_and_stays_in_use(machine: Machine) -> None:
    site, driver = machine.site, machine.driver
    driver.set(B, temperature=93)
    hot = ("device_warning", B)
    site.until(lambda: machine.incidents("--open") == [hot], "a warning")
    site.submit(nproc_per_node=2)
    site.until(lambda: site.trains(2), "two ranks")
    driver.set(B, temperature=80)
    site.until(lambda: machine.incidents("--open") == [], "its end")
    assert machine.incidents() == [hot]


def test_an_agent_that_was_killed_does_not_leave_a_warning_behind(machine: Machine) -> None:
    site, driver = machine.site, machine.driver
    driver.set(B, temperature=93)
    site.until(lambda: machine.incidents("--open"), "a warning")
    site.processes[-1].kill()
    site.processes[-1].wait()
    driver.set(B, temperature=60)
    folder = str(site.folder)
    site.start_agent("n1", LD_LIBRARY_PATH=folder, FAKE_NVML=str(driver.path))
    site.until(lambda: machine.incidents("--open") == [], "its end")
