"""What a kernel reports about its machine, and what is shown where it reports nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.flow.records import codes, phrases
from torchloom.agent.monitor.pressure import describe_host, read_pressure
from torchloom.protocol.node import Pressure
from torchloom.protocol.phrase import phrase

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


def test_a_machine_is_described_by_what_its_kernel_tells(kernel: Path) -> None:
    parts = describe_host(kernel).args["parts"]
    assert isinstance(parts, tuple)
    assert phrase("host_pressure", cpu=40.25, memory=0.5, io=2.0) in parts
    assert [code for code, _ in phrases(describe_host(kernel / "none"))][:3] == ["host", "host_load", "host_memory"]
    assert "host_pressure" not in codes(describe_host(kernel / "none"))
