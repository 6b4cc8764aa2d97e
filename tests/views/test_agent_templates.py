"""Sentences about what agents found: ends of ranks, cold starts, devices, machines and node checks."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from torchloom.agent.monitor.exit_evidence import how_it_ended
from torchloom.agent.monitor.gpu_health import describe
from torchloom.agent.monitor.gpu_readings import GpuState
from torchloom.agent.monitor.pressure import describe_host
from torchloom.agent.node_check.checks import answering, clock, disk
from torchloom.agent.supervisor.protocol import Ended
from torchloom.protocol.node import Reading
from torchloom.protocol.phrase import phrase
from torchloom.views.wording.phrases import render


@pytest.mark.parametrize(
    ("end", "sentence"),
    [
        ({"code": 0}, "ended well"),
        ({"code": 2}, "exit code 2"),
        ({"signal": 9}, "killed by SIGKILL"),
        ({"signal": 11, "core_dumped": True}, "killed by SIGSEGV, core dumped"),
        ({"signal": 40}, "killed by signal 40"),
        ({"signal": 9, "lost": True}, "killed with its supervisor"),
    ],
)
def test_one_line_says_how_a_rank_ended(end: dict[str, object], sentence: str) -> None:
    assert render(how_it_ended(Ended(key="k", at=1.0, **end))) == sentence  # type: ignore[arg-type]


def test_the_end_of_a_rank_has_its_last_lines_first_and_its_cause_last() -> None:
    how = phrase("exit_code", status=1)
    end = phrase("rank_end", lines="first\nlast", how=how, error="ValueError: x")
    assert render(end) == "first\nlast\nexit code 1: ValueError: x"
    assert render(phrase("rank_end", lines="", how=how, error="")) == "exit code 1"
    short = phrase("rank_end", lines="", how=how, error=phrase("out_of_memory", kills=2))
    assert render(short) == "exit code 1: out of memory: the kernel killed 2 processes of its cgroup while it ran"


def test_a_supervisor_that_died_is_named_with_how() -> None:
    dead = phrase("supervisor_dead", pid=7, how=phrase("killed_by", signal="SIGKILL"))
    assert render(dead) == "the supervisor (process 7) is dead: killed by SIGKILL"
    assert render(phrase("supervisor_dead", pid=7, how="")) == "the supervisor (process 7) is dead"


def test_what_an_agent_says_of_its_node_and_its_ranks() -> None:
    waits = [phrase("agent_waits", node="n1", host="10.0.0.1", cores=1, gb=1.25, gpus=gpus) for gpus in (0, 1, 8)]
    assert [render(one) for one in waits] == [
        f"n1 (10.0.0.1): 1 core, 1.2 GB, {gpus}; waiting for work" for gpus in ("no GPUs", "1 GPU", "8 GPUs")
    ]
    assert render(phrase("ranks_starting", job="mnist", ranks=((0, 3),))) == "mnist: starting ranks 0-3"
    assert render(phrase("ranks_continue", count=1)) == "1 rank continues; `loom agent` finds it again"
    assert render(phrase("ranks_continue", count=2)) == "2 ranks continue; `loom agent` finds them again"


def test_causes_of_a_failed_device() -> None:
    assert render(describe(79)) == "XID 79: GPU has fallen off the bus"
    causes = phrase("device_causes", causes=(describe(48), phrase("ecc_errors", count=5, more=2)))
    assert render(causes) == ("XID 48: uncorrected double-bit ECC error; uncorrected ECC errors: 5, 2 more than before")
    assert render(phrase("device_hot", celsius=90.4, limit=90.0)) == "90 °C, limit 90 °C"
    assert render(phrase("device_throttled", reasons=("power brake", "power cap"))) == "power brake, power cap"


def test_what_a_device_answers() -> None:
    def sentence(**reading: object) -> str:
        return render(answering("GPU-a", GpuState("GPU-a", Reading(device="GPU-a", **reading))).found)  # type: ignore[arg-type]

    assert sentence() == "it answers"
    assert sentence(name="H100", temperature=64.6) == "H100, 65 °C"
    assert sentence(name="H100", temperature=0.0, memory_mb=1024.0, memory_total_mb=81920.0) == (
        "H100, 0 °C, 1,024 of 81,920 MB used"
    )


def test_a_machine_in_a_line(tmp_path: Path) -> None:
    for name in ("cpu", "memory", "io"):
        (tmp_path / name).write_text("some avg10=40.25 avg60=0 avg300=0 total=1\nfull avg10=2.00 total=1\n")
    pattern = r"load \d+\.\d on \d+ cores?, \d+\.\d of \d+ GB free, pressure cpu 40 % memory 2 % io 2 %(, .*)?"
    assert re.fullmatch(pattern, render(describe_host(tmp_path)))
    assert "pressure" not in render(describe_host(tmp_path / "none"))


def test_a_folder_that_is_not_there_yet(tmp_path: Path) -> None:
    missing = tmp_path / "mount" / "runs"
    check = disk("checkpoint folder", missing, 1, ours=False)
    assert render(check.found).startswith(f"{missing}: not there yet; its disk, that of {tmp_path}, has ")
    assert f"{missing.parent} is not there either" in render(check.remedy)
    assert "either" not in render(disk("checkpoint folder", tmp_path / "runs", 1, ours=False).remedy)


def test_a_clock() -> None:
    sentences = [render(clock(skew).found) for skew in (0.01, -5.1, 7.0)]
    assert sentences == ["as the weaver's", "5.1 s behind the weaver's", "7.0 s ahead of the weaver's"]
    assert render(phrase("clock_not_compared", error="TimeoutError")) == (
        "not compared: the weaver did not tell the time (TimeoutError)"
    )
