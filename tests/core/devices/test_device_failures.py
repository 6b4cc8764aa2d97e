"""A device that failed gets no new ranks until it works again."""

from __future__ import annotations

import pytest

from tests.core.site import Site, a_node, room, waiting
from torchloom.protocol.facts import DeviceFailed
from torchloom.protocol.operator import Recover

DEVICES = ("GPU-a", "GPU-b")


def placed(site: Site) -> list[str]:
    return [place.device for place in site.run.places]


def broken(*devices: str, tied: bool = False) -> Site:
    site = Site(devices=DEVICES)
    site.agents["n1"].tied = tied
    site.settle()
    for device in devices:
        site.loom.tell(DeviceFailed(device=device, cause="XID 79"))
    return site


def test_ranks_go_to_the_devices_that_work() -> None:
    site = broken("GPU-a")
    site.submit(per_node=1)
    site.settle()
    assert (site.phase, placed(site)) == ("running", ["GPU-b"])


def test_a_job_that_would_need_a_failed_device_waits_until_it_works_again() -> None:
    site = broken("GPU-a")
    site.submit(per_node=2)
    site.settle()
    assert (site.phase, waiting(site)) == ("submitted", a_node(2, room("n1", 1, 2, failed=1)))
    site.loom.ask(Recover(device="GPU-a"))
    site.settle(1)
    assert (site.phase, placed(site)) == ("running", ["GPU-a", "GPU-b"])


def test_a_node_whose_devices_have_all_failed_takes_nothing_on_its_cores() -> None:
    site = broken(*DEVICES)
    site.submit(per_node=1)
    site.settle()
    assert (site.phase, waiting(site)) == ("submitted", a_node(1, room("n1", 0, 2, failed=2)))


def test_who_runs_on_a_device_that_failed_takes_no_room_from_those_that_work() -> None:
    site = Site(devices=DEVICES)
    site.submit(1, job="other", per_node=1)
    site.settle()
    site.loom.tell(DeviceFailed(device="GPU-a"))  # where the other one runs
    site.submit(2, per_node=1)
    site.settle()
    assert (site.phase, placed(site)) == ("running", ["GPU-b"])


def test_the_next_attempt_leaves_the_device_that_failed() -> None:
    site = Site(devices=DEVICES)
    site.submit(per_node=1)
    site.settle()
    assert placed(site) == ["GPU-a"]
    site.loom.tell(DeviceFailed(device="GPU-a"))
    site.agents["n1"].end(0, code=1, error="CUDA error")
    site.settle(1)
    assert (site.run.attempt, placed(site)) == (2, ["GPU-b"])


@pytest.mark.parametrize(
    ("ranks", "failed", "devices"),
    [
        (2, (), ["", ""]),  # the script chooses
        (1, ("GPU-a",), ["GPU-b"]),
        (2, ("GPU-a",), []),
        (3, ("GPU-a",), ["GPU-b", "", ""]),  # more ranks than devices share those that work
        (3, DEVICES, []),
    ],
)
def test_an_agent_that_serves_one_job_alone_is_told_which_devices_only_if_some_have_failed(
    ranks: int, failed: tuple[str, ...], devices: list[str]
) -> None:
    site = broken(*failed, tied=True)
    site.submit(per_node=ranks, node="n1", attended=True)
    site.settle()
    assert (site.phase, placed(site)) == ("running" if devices else "submitted", devices)
