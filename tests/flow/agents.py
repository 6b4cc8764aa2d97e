"""A control plane with agents, each a real process and a node of its own name, driven through the command line."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil

from tests.flow.records import read_records
from torchloom.bus.weaver_client import WeaverClient
from torchloom.protocol.phrase import Phrase, phrase
from torchloom.protocol.records import Record
from torchloom.protocol.subjects import Role
from torchloom.protocol.views import NodeView, RunsView
from torchloom.settings import Settings
from torchloom.views.wording.phrases import render

LOOM = [sys.executable, "-P", "-m", "torchloom.cli.main"]
PATIENCE = 120.0
"""Seconds after which something that has not come is taken not to come. Machines may have much else to do."""
SCRIPT = """
import os, sys, time
from pathlib import Path
import torchloom

folder, steps, rank = Path(sys.argv[1]), int(sys.argv[2]), int(os.environ["RANK"])
resume = os.environ["TORCHLOOM_RESUME_FROM"]
first = int(Path(resume).stem.rpartition("_")[2]) if resume else 0
node, attempt = os.environ["GROUP_RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]
(folder / f"pid-{rank}").write_text(str(os.getpid()))
print(f"rank {rank} of {os.environ['WORLD_SIZE']} on node {node} from {first} attempt {attempt}", flush=True)
print(f"a complaint of {rank}", file=sys.stderr, flush=True)
with torchloom.attach() as loom:
    for step in range(first + 1, steps + 1):
        time.sleep(0.02)
        loom.step(step=step)
        if loom.stopping or (folder / "finish").exists():
            break
if (folder / "fail").exists():
    sys.exit(7)
print(f"rank {rank} ends", flush=True)
"""


class Cluster:
    def __init__(self, folder: Path, *listen: str, **env: str) -> None:
        self.folder = folder
        (folder / "train.py").write_text(SCRIPT)
        self.env = {k: v for k, v in os.environ.items() if not k.startswith("TORCHLOOM_")}
        self.env["TORCHLOOM_STATE"] = str(folder / "state")
        self.settings = Settings(state=self.env["TORCHLOOM_STATE"])
        self.processes: list[subprocess.Popen[bytes]] = []
        self.before: set[Path] = set()
        """What older runs have printed."""
        self.start("up", "--port", "0", *listen, **env)
        self.until(lambda: self.loom("status").returncode == 0, "a control plane")

    # ── processes ──

    def start(self, *words: str, **env: str) -> subprocess.Popen[bytes]:
        with (self.folder / "started.log").open("ab") as output:
            process = subprocess.Popen(
                [*LOOM, *words], env=self.env | env, stdin=subprocess.DEVNULL, stdout=output, stderr=output,
                cwd=self.folder,
            )  # fmt: skip
        self.processes.append(process)
        return process

    def start_agent(self, name: str, standby: int = 0, **env: str) -> subprocess.Popen[bytes]:
        process = self.start("agent", "--name", name, "--standby", str(standby), **env)
        self.until(lambda: self.agent(name) == process.pid, f"agent {name}")
        return process

    def loom(self, *words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*LOOM, *words], env=self.env, capture_output=True, text=True, cwd=self.folder, timeout=PATIENCE
        )

    def submit(self, steps: int = 100_000, **settings: Any) -> None:
        given = {"script": "train.py", "args": [str(self.folder), str(steps)], "standby": False} | settings
        text = "".join(f"{key} = {_toml(value)}\n" for key, value in given.items())
        (self.folder / "mnist.toml").write_text(text)
        self.before = self._logs()
        done = self.loom("submit", "mnist.toml")
        assert done.returncode == 0, done.stderr

    # ── looking ──

    def nodes(self) -> tuple[NodeView, ...]:
        return self._runs().nodes

    def _runs(self) -> RunsView:
        async def look() -> RunsView:
            async with WeaverClient(self.settings, Role.VIEWER, timeout=20, connect_timeout=20) as weaver:
                return await weaver.runs()

        return asyncio.run(look())

    def records(self, job: str = "") -> list[Record]:
        """All that is in the log, or what names this job."""
        found = asyncio.run(read_records(self.settings))
        return [record for record in found if not job or getattr(record, "job", "") == job]

    def waits_for(self, job: str = "mnist") -> str:
        """What a job that cannot be placed waits for, as people read it; empty if it does not wait."""
        return next((run.waiting for run in self._runs().runs if run.job == job), "")

    def agent(self, name: str) -> int:
        """The process of an agent, as the control plane knows it."""
        return next((node.beat.pid for node in self.nodes() if node.node == name), 0)

    def standby_mb(self, name: str) -> int:
        """What processes that are ready take on this node."""
        return next((node.beat.standby_mb for node in self.nodes() if node.node == name), 0)

    def pid(self, rank: int) -> int:
        return int((self.folder / f"pid-{rank}").read_text())

    def trains(self, ranks: int, attempt: int = 0) -> bool:
        """Whether so many ranks of the newest run have begun this attempt."""
        found = [path for run in self._logs() - self.before for path in run.glob(f"attempt-{attempt + 1}/rank-*.out")]
        return sum(f"attempt {attempt}\n" in path.read_text() for path in found) == ranks

    def _logs(self) -> set[Path]:
        """The folders of all runs so far, on each node."""
        return set(self.folder.glob("state/agents/*/jobs/mnist/logs/*"))

    def until(self, what: Callable[[], Any], wanted: str, seconds: float = PATIENCE) -> None:
        end = time.monotonic() + seconds
        while not what():
            assert time.monotonic() < end, f"{wanted}: not within {seconds:g} s\n{self.log()}"
            time.sleep(0.05)

    def log(self) -> str:
        return (self.folder / "started.log").read_text(errors="replace")[-3000:]

    # ── the end ──

    def close(self) -> None:
        """Whatever still lives of what was started here, supervisors and ranks too, by the folder they work in."""
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            process.wait()
        for process in ours(self.folder):
            with contextlib.suppress(psutil.Error):
                process.kill()


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {_toml(item)}" for key, item in value.items()) + "}"
    return json.dumps(value)


def ours(folder: Path) -> list[psutil.Process]:
    """Processes that have this state folder in their environment."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.pid != os.getpid() and process.environ().get("TORCHLOOM_STATE", "").startswith(str(folder)):
                found.append(process)
    return found


def said(process: psutil.Process) -> str:
    """With which words it was started; nothing if it has ended."""
    with contextlib.suppress(psutil.Error):
        return " ".join(process.cmdline())
    return ""


def needs_nodes(count: int, ranks: int, **nodes: Phrase) -> str:
    """As people read that a job waits for nodes with room for its ranks, and what each offers (node_a: node-a)."""
    offers = [phrase("of_node", node=node.replace("_", "-"), text=offer) for node, offer in nodes.items()]
    there = phrase("nodes_there", nodes=offers, more=None)
    return render(phrase("waits_for_nodes", count=count, ranks=ranks, there=there))


@contextlib.contextmanager
def cluster(folder: Path, **env: str) -> Iterator[Cluster]:
    one = Cluster(folder, **env)
    try:
        yield one
    finally:
        one.close()
