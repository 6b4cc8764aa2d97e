"""What a kernel tells of how its machine fares, and what is said where it tells nothing."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from torchloom.agent.monitor.pressure import host_line, read_pressure
from torchloom.protocol.node import Pressure

CPU = "some avg10=40.25 avg60=10.00 avg300=1.00 total=1\nfull avg10=0.00 avg60=0.00 avg300=0.00 total=0\n"
MEMORY = "some avg10=9.00 avg60=0.00 avg300=0.00 total=5\nfull avg10=0.50 avg60=0.00 avg300=0.00 total=5\n"
IO = "some avg10=30.00 avg60=0.00 avg300=0.00 total=5\nfull avg10=2.00 avg60=0.00 avg300=0.00 total=5\n"


@pytest.fixture
def kernel(tmp_path: Path) -> Path:
    for name, text in {"cpu": CPU, "memory": MEMORY, "io": IO}.items():
        (tmp_path / name).write_text(text)
    return tmp_path


def test_some_wait_for_a_processor_and_all_for_memory_or_a_disk(kernel: Path) -> None:
    assert read_pressure(kernel) == Pressure(cpu=40.25, memory=0.5, io=2.0)


def test_a_kernel_that_tells_nothing(tmp_path: Path) -> None:
    assert read_pressure(tmp_path / "none") is None


@pytest.mark.parametrize("text", ["", "some\n", "some avg10=much\n", "some avg60=1.0\n", "full avg10\n"])
def test_what_makes_no_sense_is_left_out(kernel: Path, text: str) -> None:
    (kernel / "cpu").write_text(text)
    (kernel / "memory").unlink()
    assert read_pressure(kernel) == Pressure(io=2.0)


def test_a_machine_in_a_line(kernel: Path) -> None:
    pattern = r"load \d+\.\d on \d+ cores?, \d+\.\d of \d+ GB free, pressure cpu 40 % memory 0 % io 2 %(, .*)?"
    assert re.fullmatch(pattern, host_line(kernel))
    assert "pressure" not in host_line(kernel / "none")
