"""Machines of their own on this one: each node a network namespace with its own address, a bridge between them.

    with two_nodes(folder) as site:
        site.start_agent("node-a")
        site.cut("node-a")

The control plane listens on the bridge, so everything goes over a real network, with TLS and join tokens.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

from tests.flow.agents import LOOM, Cluster

NODES = ("node-a", "node-b")
PATIENCE = "20"
"""Seconds; a node that is silent for longer than this is given up. A killed agent is replaced sooner on any machine."""


def why_not() -> str:
    """Why no namespaces can be made here; empty if they can."""
    if shutil.which("ip") is None:
        return "two nodes need network namespaces, and `ip` (iproute2) is not installed"
    name = f"loom-{os.getpid()}"
    for words in (("netns", "add", name), ("link", "add", f"lt{os.getpid()}", "type", "bridge")):
        tried = subprocess.run(["ip", *words], capture_output=True, text=True)
        if tried.returncode != 0:
            break
    for words in (("link", "del", f"lt{os.getpid()}"), ("netns", "del", name)):
        subprocess.run(["ip", *words], capture_output=True)
    said = tried.stderr.strip()
    return f"two nodes need network namespaces, which take root: {said}" if tried.returncode else ""


class Network:
    """A bridge with the host on it, and a namespace for each node."""

    def __init__(self) -> None:
        pid = os.getpid()
        self.tag = f"{pid % 0xFFFF:x}"
        self.bridge = f"lb{self.tag}"
        self.net = f"10.{200 + pid % 50}.{pid // 50 % 250}"
        self.host = f"{self.net}.1"
        self.made: list[str] = []

    def make(self) -> None:
        ip("link", "add", self.bridge, "type", "bridge")
        ip("addr", "add", f"{self.host}/24", "dev", self.bridge)
        ip("link", "set", self.bridge, "up")
        for number, node in enumerate(NODES):
            here, there, space = self.cable(node), f"lp{self.tag}{number}", self.space(node)
            ip("netns", "add", space)
            self.made.append(space)
            ip("link", "add", here, "type", "veth", "peer", "name", there)
            ip("link", "set", here, "master", self.bridge, "up")
            ip("link", "set", there, "netns", space)
            ip("-n", space, "addr", "add", f"{self.address(node)}/24", "dev", there)
            for name in ("lo", there):
                ip("-n", space, "link", "set", name, "up")

    def remove(self) -> None:
        for link in (*map(self.cable, NODES), self.bridge):
            subprocess.run(["ip", "link", "del", link], capture_output=True)
        for space in self.made:
            subprocess.run(["ip", "netns", "del", space], capture_output=True)

    def space(self, node: str) -> str:
        return f"loom-{self.tag}-{node}"

    def cable(self, node: str) -> str:
        """The host's end."""
        return f"lc{self.tag}{NODES.index(node)}"

    def address(self, node: str) -> str:
        return f"{self.net}.{NODES.index(node) + 11}"


class Site(Cluster):
    """A control plane on the host, and nodes that have joined it."""

    def __init__(self, folder: Path, network: Network) -> None:
        self.network = network
        super().__init__(folder, "--listen", network.host, TORCHLOOM_NODE_PATIENCE_SECONDS=PATIENCE)
        token = self.loom("token", "--expires", "1h").stdout
        for node in NODES:
            self.inside(node, "join", "-", input=token)

    def inside(self, node: str, *words: str, input: str = "") -> None:
        """A `loom` command on a node, to its end."""
        command = ["ip", "netns", "exec", self.network.space(node), *LOOM, *words]
        env = self.env | {"TORCHLOOM_STATE": str(self.folder / node)}
        subprocess.run(command, env=env, input=input, text=True, check=True, capture_output=True, timeout=120)

    def begin_agent(self, node: str) -> subprocess.Popen[bytes]:
        command = ["ip", "netns", "exec", self.network.space(node), *LOOM, "agent", "--standby", "0", "--name", node]
        env = self.env | {"TORCHLOOM_STATE": str(self.folder / node)}
        with (self.folder / "started.log").open("ab") as output:
            process = subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
        self.processes.append(process)
        return process

    def start_agent(self, node: str) -> subprocess.Popen[bytes]:
        process = self.begin_agent(node)
        self.until(lambda: self.agent(node) == process.pid, f"agent {node}")
        return process

    def cut(self, node: str) -> None:
        ip("link", "set", self.network.cable(node), "down")

    def mend(self, node: str) -> None:
        ip("link", "set", self.network.cable(node), "up")

    def pids(self, node: str, job: str) -> dict[int, int]:
        """The processes of a job's ranks that run on a node, as its agent says."""
        beats = [view.beat for view in self.nodes() if view.node == node]
        attempts = [attempt for beat in beats for attempt in beat.attempts if attempt.job == job]
        return {rank.rank: rank.pid for a in attempts for rank in a.ranks if rank.state == "running"}


@contextlib.contextmanager
def two_nodes(folder: Path) -> Iterator[Site]:
    network = Network()
    site: Site | None = None
    try:
        network.make()
        site = Site(folder, network)
        yield site
    finally:
        if site is not None:
            site.close()
        network.remove()


def ip(*words: str) -> None:
    ran = subprocess.run(["ip", *words], capture_output=True, text=True)
    assert ran.returncode == 0, f"ip {' '.join(words)}: {ran.stderr}"
