"""What a node has: cores, memory, devices, and a name by which it is told from the others."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass

import psutil

from torchloom.threadlet.names import sanitised
from torchloom.threadlet.probe import gpu_uuids, visible_devices


@dataclass(frozen=True)
class Node:
    name: str
    host: str
    """Under which others reach it."""
    cores: int
    memory_mb: int
    devices: tuple[str, ...]


def this_node(name: str = "", host: str = "") -> Node:
    hostname = socket.gethostname()
    devices = visible_devices(gpu_uuids(), os.environ.get("CUDA_VISIBLE_DEVICES"))
    return Node(
        name=name or sanitised(hostname) or "node",
        host=host or "127.0.0.1",
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        memory_mb=psutil.virtual_memory().total // 2**20,
        devices=devices,
    )
