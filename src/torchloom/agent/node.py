"""The name, cores, memory and devices of a node."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

import psutil

from torchloom.threadlet.process.hardware import gpu_uuids, visible_devices
from torchloom.threadlet.process.identity import sanitised


@dataclass(frozen=True)
class Node:
    name: str
    host: str
    """Under which others reach it."""
    cores: int
    memory_mb: int
    devices: tuple[str, ...]
    interface: str = ""
    """The network that `host` is an address of."""
    loader_budget: int | None = None
    """Loader processes that jobs may have here in all; absent: as the cores allow."""


def this_node(name: str = "", host: str = "", loader_budget: int | None = None) -> Node:
    hostname = os.environ.get("SLURMD_NODENAME") or socket.gethostname()  # one machine may be several of Slurm's nodes
    return Node(
        name=name or sanitised(hostname) or "node",
        host=host or "127.0.0.1",
        cores=cores(os.environ),
        memory_mb=psutil.virtual_memory().total // 2**20,
        devices=visible_devices(gpu_uuids(), os.environ.get("CUDA_VISIBLE_DEVICES")),
        interface=interface_of(host),
        loader_budget=loader_budget,
    )


def cores(environ: Mapping[str, str]) -> int:
    """Those this process may use; of a Slurm that does not bind, those it has given."""
    may = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    given = environ.get("SLURM_CPUS_ON_NODE", "")
    return min(may, max(1, int(given))) if given.isdecimal() else may


def address_towards(url: str) -> str:
    """The address of this machine that the server at this URL sees: under it, others on that network reach it too."""
    there = urlsplit(url)
    with contextlib.suppress(OSError):
        route, *_ = socket.getaddrinfo(there.hostname, there.port or 4222, type=socket.SOCK_DGRAM)
        with socket.socket(*route[:3]) as probe:
            probe.connect(route[4])  # nothing is sent
            return str(probe.getsockname()[0])
    return "127.0.0.1"


def interface_of(host: str) -> str:
    """Which network interface has this address; empty if none has, or if it does not matter."""
    if not host or host.startswith("127."):
        return ""
    for name, addresses in psutil.net_if_addrs().items():
        if any(address.address.partition("%")[0] == host for address in addresses):
            return name
    return ""
