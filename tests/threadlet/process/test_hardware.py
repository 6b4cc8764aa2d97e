"""Which device a rank computes on, judged without a driver."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from torchloom.protocol.ids import NAME
from torchloom.threadlet.process.hardware import cpu_id, find_devices, free_mb, own_devices, rss_mb, visible_devices

A, B, C = "GPU-aaaa1111", "GPU-bbbb2222", "GPU-bbcc3333"
ALL = (A, B, C)


@pytest.mark.parametrize(
    ("visible", "seen"),
    [
        (None, ALL),
        ("", ()),
        ("-1", ()),
        ("2,0", (C, A)),
        ("1, -1, 0", (B,)),
        ("0,7,1", (A,)),
        ("0,0,1", (A,)),
        (B, (B,)),
        ("GPU-a,GPU-bbc", (A, C)),
        ("GPU-bb", ()),
        ("GPU-zz,0", ()),
        ("MIG-1234-abcd", ("MIG-1234-abcd",)),
        ("MIG-GPU-1234/1/2", ("MIG-GPU-1234-1-2",)),
        ("nonsense", ()),
    ],
)
def test_visible_devices_are_read_as_cuda_reads_them(visible: str | None, seen: tuple[str, ...]) -> None:
    assert visible_devices(ALL, visible) == seen


def test_a_local_rank_has_its_own_device() -> None:
    assert own_devices(ALL, 1) == (B,)
    assert own_devices(ALL, None) == (A,)
    assert own_devices(ALL, 4) == (B,)
    assert own_devices((), 0) == ()


def test_with_a_virtual_local_rank_it_is_the_one_visible_device() -> None:
    assert own_devices(visible_devices(ALL, "2"), 0) == (C,)


def test_without_a_gpu_it_is_the_host_always_the_same() -> None:
    (device,) = find_devices("", None, "host")
    assert device.startswith("CPU-")
    assert NAME.fullmatch(device)
    assert find_devices("", 3, "host") == (device,)
    assert cpu_id("a", "m") != cpu_id("b", "m")


def test_memory_is_known() -> None:
    assert rss_mb() > 1


def test_probing_imports_no_torch() -> None:
    probe = "from torchloom.threadlet.process.hardware import device_mb; device_mb()"
    code = f"import sys; {probe}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_what_is_left_is_the_least_of_what_the_machine_and_each_cgroup_above_leave(tmp_path: Path) -> None:
    proc, root = tmp_path / "proc", tmp_path / "cgroup"
    own = root / "slice" / "job"
    own.mkdir(parents=True)
    proc.mkdir()
    (proc / "cgroup").write_text("0::/slice/job\n")
    (own / "memory.max").write_text("max\n")
    (own / "memory.current").write_text(f"{50 * 2**20}\n")
    (root / "slice" / "memory.max").write_text(f"{200 * 2**20}\n")
    (root / "slice" / "memory.current").write_text(f"{80 * 2**20}\n")
    assert free_mb(proc, root) == 120.0
    (root / "slice" / "memory.current").write_text(f"{300 * 2**20}\n")
    assert free_mb(proc, root) == 0.0


def test_without_cgroups_the_machine_counts(tmp_path: Path) -> None:
    left = free_mb(tmp_path / "none", tmp_path)
    assert left is not None
    assert 0 < left <= psutil.virtual_memory().total / 2**20
