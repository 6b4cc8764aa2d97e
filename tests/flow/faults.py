"""A training to be hit: two ranks under `loom run`, and a census of what is left of them.

There are two scripts. GLOO trains a model whose gradients are averaged over the ranks. LIGHT needs no torch, so that it
starts in a blink; its state is a chain of hashes. Both write down each life (`lives`), the step they are at (`step-N`)
and what they end with (`end-N`), and do what a file `do-N` tells them: exit, raise, eat memory, start a child, or hang
and be deaf to SIGTERM.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import re
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from torchloom.bus.asking import Asking
from torchloom.bus.client import connect, find
from torchloom.bus.log import read_log
from torchloom.errors import TorchLoomError
from torchloom.messages import Answer, Ask, AttemptBegan, Record, RunView, decode_entry
from torchloom.settings import Settings
from torchloom.subjects import LOG_STREAM, Role

LOOM = [sys.executable, "-P", "-m", "torchloom.cli.main"]
MARK = "LOOM_TEST_MARK"
"""Everything that a test starts has it in its environment, and so has what that starts."""
_BOTH = """
import json, os, signal, subprocess, sys, time
from pathlib import Path

folder, steps = Path(sys.argv[1]), int(sys.argv[2])
rank, attempt = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"]) + 1

def live(first):
    port = int(os.environ["MASTER_PORT"])
    life = {"attempt": attempt, "rank": rank, "pid": os.getpid(), "first": first, "port": port}
    with (folder / "lives").open("a") as lives:
        lives.write(json.dumps(life) + "\\n")

def obey(step):
    (folder / f"step-{rank}").write_text(str(step))
    order = folder / f"do-{rank}"
    if not order.exists():
        return
    told = order.read_text()
    if told:
        order.unlink()
    if told == "exit":
        os._exit(1)
    if told == "raise":
        raise ValueError("as it was told")
    if told == "deaf":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        (folder / f"deaf-{rank}").touch()
        while True:
            time.sleep(1)
    if told == "child":
        child = subprocess.Popen(["sleep", "600"])
        (folder / f"child-{rank}").write_text(str(child.pid))
    if told == "eat":
        hoard = []
        while True:
            hoard.append(bytearray(os.urandom(1 << 20)) * 8)

def end(value):
    (folder / f"end-{rank}").write_text(value)
"""
LIGHT = (
    _BOTH
    + """
import hashlib, zipfile

kept, value, first = folder / "kept", "", 0
resume = os.environ["TORCHLOOM_RESUME_FROM"]
if resume:
    with zipfile.ZipFile(resume) as archive:
        first, value = json.loads(archive.read("a/data.pkl"))
live(first)
kept.mkdir(exist_ok=True)
for step in range(first + 1, steps + 1):
    time.sleep(0.01)
    value = hashlib.sha256(f"{value} {step}".encode()).hexdigest()
    if rank == 0 and step % 5 == 0:
        beside = folder / "beside"
        with zipfile.ZipFile(beside, "w") as archive:
            archive.writestr("a/data.pkl", json.dumps([step, value]))
        beside.rename(kept / f"checkpoint_step_{step}.pt")
    obey(step)
end(value)
"""
)
GLOO = (
    _BOTH
    + """
import hashlib
import torch
import torch.distributed as dist
import torchloom

dist.init_process_group("gloo")
torch.manual_seed(1)
model = torch.nn.Linear(8, 4)
checkpoints = torchloom.Checkpoints(folder / "kept", every=5, keep=4)
state = {"model": model}
first = checkpoints.resume(state)
live(first)
step, last = first, folder / "last"  # where it ends may be told while it runs, well ahead
with torchloom.attach() as loom:
    while step < (int(last.read_text()) if last.exists() else steps):
        step += 1
        chance = torch.Generator().manual_seed(step * dist.get_world_size() + rank)
        loss = model(torch.randn(4, 8, generator=chance)).square().mean()
        model.zero_grad()
        loss.backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
            parameter.data -= 0.01 * parameter.grad / dist.get_world_size()
        time.sleep(0.01)
        checkpoints.save(step, state)
        loom.step(step=step, loss=loss)
        obey(step)
        if loom.stopping:
            break
checkpoints.close()
end(hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest())
dist.barrier()
dist.destroy_process_group()
"""
)


def trained(steps: int, ranks: int = 2) -> str:
    """What GLOO ends with if nothing disturbs it: the same sums, in one process."""
    import torch

    torch.manual_seed(1)
    model = torch.nn.Linear(8, 4)
    for step in range(1, steps + 1):
        model.zero_grad()
        for rank in range(ranks):
            chance = torch.Generator().manual_seed(step * ranks + rank)
            model(torch.randn(4, 8, generator=chance)).square().mean().backward()  # adds up
        for parameter in model.parameters():
            parameter.data -= 0.01 * parameter.grad / ranks
    return hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()


def chain(steps: int) -> str:
    """What LIGHT ends with if nothing disturbs it."""
    value = ""
    for step in range(1, steps + 1):
        value = hashlib.sha256(f"{value} {step}".encode()).hexdigest()
    return value


# ── what is left ─────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Census:
    """Taken before; `left` compares with it after. Everything is looked for by a mark in its environment."""

    mark: str
    temporary: Path
    shared: frozenset[str]

    @classmethod
    def take(cls, temporary: Path) -> Census:
        temporary.mkdir(exist_ok=True)
        return cls(secrets.token_hex(8), temporary, frozenset(_shared()))

    @property
    def env(self) -> dict[str, str]:
        return {MARK: self.mark, "TMPDIR": str(self.temporary)}

    def processes(self) -> list[psutil.Process]:
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(OSError, psutil.Error):
                if f"{MARK}={self.mark}".encode() in Path(f"/proc/{process.pid}/environ").read_bytes():
                    found.append(process)
        return found

    def left(self, pids: set[int], ports: set[int], seconds: float = 10.0) -> list[str]:
        """What should be gone and is not, after the kernel had time to take it away."""
        end = time.monotonic() + seconds
        while (found := self._left(pids, ports)) and time.monotonic() < end:
            time.sleep(0.05)
        return found

    def _left(self, pids: set[int], ports: set[int]) -> list[str]:
        found = [f"process {process.pid}: {_command(process)}" for process in self.processes()]
        for pid in pids:
            with contextlib.suppress(psutil.Error):
                if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
                    found.append(f"zombie {pid}")
        listening = {c.laddr.port for c in psutil.net_connections("tcp") if c.status == psutil.CONN_LISTEN}
        found += [f"port {port}" for port in sorted(ports & listening)]
        found += [f"shared memory {name}" for name in sorted(_shared() - self.shared) if not _in_use(name)]
        kept = [path.name for path in self.temporary.iterdir() if not path.name.startswith("torchinductor_")]  # torch's
        return found + [f"temporary {name}" for name in sorted(kept)]


def _command(process: psutil.Process) -> str:
    with contextlib.suppress(psutil.Error):
        return " ".join(process.cmdline())[:200]
    return "gone by now"


def _shared() -> set[str]:
    return set(os.listdir("/dev/shm"))  # noqa: PTH208


def _in_use(name: str) -> bool:
    """Whether some process, of whatever test, has it open or mapped: then it is not a leftover."""
    for process in psutil.process_iter():
        with contextlib.suppress(OSError, psutil.Error):
            if f"/dev/shm/{name}" in Path(f"/proc/{process.pid}/maps").read_text():
                return True
            if any(file.path == f"/dev/shm/{name}" for file in process.open_files()):
                return True
    return not Path("/dev/shm", name).exists()


# ── a control plane ──────────────────────────────────────────────────────────────────────────────────────────────────


class Up:
    """A real `loom up`, which starts its weaver and its nats-server again when they die."""

    def __init__(self, folder: Path) -> None:
        self.settings = Settings(state=str(folder))
        self.env = {k: v for k, v in os.environ.items() if not k.startswith("TORCHLOOM_")}
        self.env["TORCHLOOM_STATE"] = str(folder)
        self.process = subprocess.Popen(
            [*LOOM, "up", "--port", "0"], env=self.env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        self.until_it_answers()

    def child(self, name: str) -> psutil.Process | None:
        for process in psutil.Process(self.process.pid).children():
            with contextlib.suppress(psutil.Error):
                if name in " ".join(process.cmdline()):
                    return process
        return None

    def kill(self, name: str) -> None:
        """The weaver or the nats-server; returns when it is dead."""
        child = self.child(name)
        assert child is not None, f"no {name}"
        child.kill()
        child.wait(10)

    def run(self, job: str) -> RunView | None:
        async def look() -> RunView | None:
            async with Asking(self.settings, Role.OPERATOR, timeout=1.0, connect_timeout=1.0) as weaver:
                return next(iter((await weaver.runs(job)).runs), None)

        with contextlib.suppress(TorchLoomError):
            return asyncio.run(look())
        return None

    def standby_mb(self, job: str) -> int:
        async def look() -> int:
            async with Asking(self.settings, Role.OPERATOR, timeout=1.0, connect_timeout=1.0) as weaver:
                view = await weaver.runs(job)
                return max((node.beat.standby_mb for node in view.nodes), default=0)

        with contextlib.suppress(TorchLoomError):
            return asyncio.run(look())
        return 0

    def ask(self, ask: Ask) -> Answer:
        async def asking() -> Answer:
            async with Asking(self.settings, Role.OPERATOR, timeout=5.0, patience=10.0) as weaver:
                return await weaver.ask(ask)

        return asyncio.run(asking())

    def until_it_answers(self) -> None:
        async def look() -> None:
            async with Asking(self.settings, Role.OPERATOR, timeout=1.0, connect_timeout=1.0) as weaver:
                await weaver.runs("-")

        end = time.monotonic() + 30
        while True:
            try:
                return asyncio.run(look())
            except TorchLoomError:
                assert time.monotonic() < end, "the control plane does not answer"
                time.sleep(0.05)

    def attempts(self, job: str) -> list[int]:
        """Each beginning of an attempt that is in the log."""

        async def read() -> list[Record]:
            client = await connect(find(self.settings, Role.VIEWER), name="test")
            try:
                entries = [decode_entry(stored.data) async for stored in read_log(client, LOG_STREAM.name, 1)]
                return [record for entry in entries for record in entry.records]
            finally:
                await client.close()

        return [r.attempt for r in asyncio.run(read()) if isinstance(r, AttemptBegan) and r.job == job]

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait(30)


# ── a run ────────────────────────────────────────────────────────────────────────────────────────────────────────────


class Run:
    """One `loom run` of LIGHT or GLOO, from outside. With `up` it uses that control plane, else it brings its own."""

    def __init__(
        self,
        folder: Path,
        *words: str,
        up: Up | None = None,
        script: str = LIGHT,
        steps: int = 60,
        ranks: int = 2,
        standby: int = 0,
        preexec: Callable[[], None] | None = None,
    ) -> None:
        self.folder = folder
        self.up = up
        self.steps = steps
        self.ranks = ranks
        self.job = f"job-{secrets.token_hex(4)}"
        self.census = Census.take(folder / "tmp")
        self.pids: set[int] = set()
        self.output = folder / "output.txt"
        self.env = {k: v for k, v in os.environ.items() if not k.startswith("TORCHLOOM_")}
        self.env |= {"TORCHLOOM_STATE": up.settings.state if up else str(folder / "state")} | self.census.env
        self.command = [*LOOM, "run", "--job", self.job, "--nproc-per-node", str(ranks), "--standby", str(standby)]
        self.command += ["--checkpoint-dir", str(folder / "kept"), *words, str(folder / "train.py"), str(folder)]
        (folder / "train.py").write_text(script)
        self.process = self._start(preexec)

    def _start(self, preexec: Callable[[], None] | None = None) -> subprocess.Popen[bytes]:
        with self.output.open("wb") as output:
            return subprocess.Popen(
                [*self.command, str(self.steps)],
                env=self.env, stdout=output, stderr=output, cwd=self.folder, preexec_fn=preexec,  # noqa: PLW1509
            )  # fmt: skip

    def again(self, steps: int) -> None:
        """The same once more, after it has ended."""
        self.steps = steps
        self.process = self._start()

    # ── looking ──

    def text(self) -> str:
        return self.output.read_text(errors="replace")

    def until(self, what: Callable[[], object], seconds: float = 40.0) -> None:
        end = time.monotonic() + seconds
        while not what():
            assert time.monotonic() < end, f"not in {seconds} s:\n{self.text()}"
            assert self.process.poll() is None or what(), f"it is over:\n{self.text()}"
            time.sleep(0.01)

    def lives(self) -> list[dict[str, int]]:
        """Every start of a rank: attempt, rank, pid, first (the step it went on from), port."""
        import json

        with contextlib.suppress(FileNotFoundError):
            whole = (self.folder / "lives").read_text().split("\n")[:-1]
            return [json.loads(line) for line in whole]
        return []

    def pid(self, rank: int, attempt: int | None = None) -> int:
        wanted = [x for x in self.lives() if x["rank"] == rank and (attempt is None or x["attempt"] == attempt)]
        return wanted[-1]["pid"]

    def step(self, rank: int = 0) -> int:
        with contextlib.suppress(FileNotFoundError, ValueError):
            return int((self.folder / f"step-{rank}").read_text())
        return 0

    def until_trained(self, attempt: int = 1, further: int = 11) -> None:
        """All ranks of this attempt run, and have made some steps."""

        def there() -> bool:
            lives = [life for life in self.lives() if life["attempt"] == attempt]
            firsts = {life["rank"]: life["first"] for life in lives}
            return len(firsts) == self.ranks and all(self.step(r) >= firsts[r] + further for r in firsts)

        self.until(there)

    def until_phase(self, phase: str, attempt: int) -> None:
        def there() -> bool:
            assert self.up
            run = self.up.run(self.job)
            return run is not None and (run.phase, run.attempt) == (phase, attempt)

        self.until(there)

    def children(self, word: str = "") -> list[psutil.Process]:
        found = []
        for process in psutil.Process(self.process.pid).children():
            with contextlib.suppress(psutil.Error):
                if word in " ".join(process.cmdline()):
                    found.append(process)
        return found

    def standby_ready(self) -> bool:
        """Whether a process waits to become a rank: it tells of its memory when torch is in it."""
        assert self.up
        return self.up.standby_mb(self.job) > 40

    # ── hitting ──

    def tell(self, rank: int, order: str) -> None:
        beside = self.folder / f"beside-{rank}"
        beside.write_text(order)
        beside.rename(self.folder / f"do-{rank}")

    def kill(self, *ranks: int) -> None:
        for pid in [self.pid(rank) for rank in ranks]:
            os.kill(pid, signal.SIGKILL)

    def interrupt(self) -> None:
        self.process.send_signal(signal.SIGINT)

    @contextlib.contextmanager
    def frozen(self, *pids: int) -> Iterator[None]:
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        try:
            yield
        finally:
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)

    # ── the end ──

    def end_soon(self) -> int:
        """Tell GLOO at which step to end: so far ahead that no rank has passed it."""
        last = self.step() + 100
        beside = self.folder / "beside"
        beside.write_text(str(last))
        beside.rename(self.folder / "last")
        return last

    def end(self, seconds: float = 60.0) -> int:
        """Its exit code."""
        self.pids |= {process.pid for process in self.census.processes()}
        return self.process.wait(seconds)

    def ends(self) -> list[str]:
        return [(self.folder / f"end-{rank}").read_text() for rank in range(self.ranks)]

    def left(self) -> list[str]:
        lives = self.lives()
        return self.census.left(self.pids | {life["pid"] for life in lives}, {life["port"] for life in lives})

    def starts(self) -> list[tuple[int, int]]:
        """(attempt, rank) of each start, in order: no pair may be there twice."""
        return sorted((life["attempt"], life["rank"]) for life in self.lives())

    def restarts(self) -> list[str]:
        return re.findall(r"loom: attempt (\d+)", self.text())

    def clear(self) -> None:
        """Whatever a failed test has left."""
        for process in (*self.census.processes(), self.process):
            with contextlib.suppress(psutil.Error, ProcessLookupError):
                process.kill()
        self.process.wait()
