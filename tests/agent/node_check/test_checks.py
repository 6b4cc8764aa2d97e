"""What is looked at to see whether a machine is fit, on this one and on ones that are not."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.agent.nvml.fake import A, B, FakeDriver
from torchloom.agent.monitor.gpu_readings import GpuState
from torchloom.agent.node_check import checks, trials
from torchloom.agent.node_check.checks import Subject, answering, clock, computed, disk, examine, reasons
from torchloom.protocol.node import Check
from torchloom.protocol.phrase import Phrase, phrase
from torchloom.protocol.views import NodeChecksView
from torchloom.views.format.tables import Screen
from torchloom.views.node_checks import fitness as table


def test_this_machine_is_fit(tmp_path: Path) -> None:
    found = examine(Subject(state=tmp_path, checkpoints=tmp_path / "still" / "to be made", skew=0.01))
    assert reasons(found) == ()
    assert [check.what for check in found.checks][-2:] == ["clock", "computing"]
    assert found.pace is not None
    assert found.pace > 0
    assert found.on in {"torch", "numpy"}


def test_a_folder_without_room_or_that_cannot_be_written_to_is_told_with_what_to_do(tmp_path: Path) -> None:
    assert disk("state folder", tmp_path, 1).fit
    full = disk("state folder", tmp_path, 10**12)
    assert not full.fit
    assert full.remedy == phrase("make_room", least=10**12, there=str(tmp_path))
    here = disk("shared memory", checks.SHARED, 10**12)
    assert here.remedy == phrase("enlarge_shared_memory", least=10**12, there=str(checks.SHARED))
    if os.geteuid() != 0:
        tmp_path.chmod(0o500)
        assert not disk("state folder", tmp_path, 1).fit
    assert not disk("checkpoint folder", Path("/proc/1/nothing"), 1).fit


def test_a_checkpoint_folder_that_is_not_there_yet_is_fit_and_said_to_be_missing(tmp_path: Path) -> None:
    missing = tmp_path / "mount" / "runs"
    found = disk("checkpoint folder", missing, 1, ours=False)
    assert found.fit
    assert isinstance(found.found, Phrase)
    assert (found.found.code, found.found.args["there"]) == ("folder_missing", str(tmp_path))
    assert found.remedy == phrase("mount_or_wait", parent=str(missing.parent))
    (line,) = [line for line in table({"n1": (found,)}, Screen()) if line.startswith("n1  ")]
    assert line.split()[3] == "look"
    near = disk("checkpoint folder", tmp_path / "runs", 1, ours=False)
    assert near.remedy == phrase("mount_or_wait", parent="")
    assert not disk("state folder", missing, 1).remedy  # we make it ourselves
    checks = examine(Subject(checkpoints=missing)).checks
    assert [check.what for check in checks if check.remedy] == ["checkpoint folder"]


def test_a_clock_may_be_a_little_wrong() -> None:
    assert clock(0.01).found == phrase("clock_right")
    assert clock(-4.9).fit
    late = clock(-5.1)
    assert (late.fit, late.found) == (False, phrase("clock_off", seconds=5.1, ahead=False))
    assert clock(7.0).found == phrase("clock_off", seconds=7.0, ahead=True)
    unknown = phrase("clock_not_compared", error="")
    assert (clock(unknown).fit, clock(unknown).found) == (True, unknown)


def test_a_device_that_the_driver_has_lost_or_says_nothing_of_is_not_fit() -> None:
    assert not answering("GPU-a", GpuState("GPU-a", lost=phrase("device_off_bus"))).fit
    assert not answering("GPU-a", GpuState("GPU-a")).fit
    assert not answering("GPU-a", None).fit


@pytest.mark.long
def test_devices_are_read_through_the_driver(driver: FakeDriver) -> None:
    found = list(checks._devices((A, B, "GPU-unknown"), None))
    assert [check.fit for check in found] == [True, True, False]
    assert found[2].found == phrase("device_unread")


@pytest.mark.parametrize(
    ("found", "fit", "reason"),
    [
        ({"trouble": phrase("trial_timed_out", seconds=90.0)}, False, phrase("trial_timed_out", seconds=90.0)),
        ({"on": "torch", "cuda": False, "seconds": 0.1, "right": True}, True, phrase("torch_without_device")),
        ({"on": "H100", "cuda": True, "seconds": 0.1, "right": False}, False, phrase("computed_wrong")),
        ({"on": "H100", "cuda": True, "seconds": 0.1, "right": True}, True, phrase("computed", ms=100.0, on="H100")),
        ({"on": ""}, True, phrase("no_torch_or_numpy")),
    ],
)
def test_what_a_computation_on_a_device_tells(found: dict[str, object], fit: bool, reason: Phrase) -> None:
    check, seconds = computed("GPU-a", found)
    assert check.fit == fit
    assert check.found == reason
    assert (seconds is not None) == (reason.code == "computed")


def test_a_trial_that_hangs_is_killed_and_one_that_dies_says_how() -> None:
    assert trials.run(("compute",), 0.05) == {"trouble": phrase("trial_timed_out", seconds=0.05)}
    trouble = trials.run(("nonsense",), 60.0)["trouble"]
    assert trouble == phrase("trial_died", how=phrase("exit_code", status=1), line="KeyError: 'nonsense'")


def test_two_processes_exchange_numbers_and_time_it() -> None:
    from concurrent.futures import ThreadPoolExecutor

    from torchloom.agent.port_and_checkpoint import free_port

    port = str(free_port("127.0.0.1"))
    with ThreadPoolExecutor(2) as both:
        words = [("exchange", "127.0.0.1", port, str(rank)) for rank in range(2)]
        found = list(both.map(lambda one: trials.run(one, 100.0), words))
    assert all(half.get("right") and half["mb_per_second"] > 0 for half in found), found


def test_reasons_name_what_was_looked_at() -> None:
    view = NodeChecksView(checks=(Check(what="memory", found="none", fit=False), Check(what="clock", found="right")))
    assert reasons(view) == (phrase("check_not_passed", what="memory", found="none"),)
