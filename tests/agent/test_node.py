"""What a node says of itself, on a machine of its own and within a Slurm allocation."""

from __future__ import annotations

import os
import socket

import pytest

from torchloom.agent import node
from torchloom.threadlet.process.identity import sanitised

GPUS = ("GPU-aaaa", "GPU-bbbb", "GPU-cccc")


@pytest.fixture(autouse=True)
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node, "gpu_uuids", lambda: GPUS)
    for name in ("SLURMD_NODENAME", "SLURM_CPUS_ON_NODE", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)


def test_a_node_is_called_as_its_machine_is_and_has_all_of_it() -> None:
    found = node.this_node()
    assert found.name == sanitised(socket.gethostname())
    assert found.devices == GPUS
    assert found.cores == len(os.sched_getaffinity(0))


def test_slurm_names_the_node_since_one_machine_may_be_several(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURMD_NODENAME", "gpu.7")
    assert node.this_node().name == "gpu-7"
    assert node.this_node(name="mine").name == "mine"


def test_it_has_the_devices_and_cores_that_slurm_gave(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,0")
    monkeypatch.setenv("SLURM_CPUS_ON_NODE", "1")
    found = node.this_node()
    assert found.devices == ("GPU-cccc", "GPU-aaaa")
    assert found.cores == 1


@pytest.mark.parametrize(("given", "most"), [("0", 1), ("many", 10_000), ("", 10_000), ("9999", 10_000)])
def test_it_never_has_none_nor_more_than_there_are(given: str, most: int) -> None:
    cores = node.cores({"SLURM_CPUS_ON_NODE": given})
    assert 1 <= cores <= min(most, len(os.sched_getaffinity(0)))
