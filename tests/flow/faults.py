"""A training to be hit: two ranks under `loom run`, seen and struck from outside, and the control plane they need."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil

from tests.flow.census import Census
from tests.flow.records import read_records
from tests.flow.scripts import LIGHT
from torchloom.bus.weaver_client import WeaverClient
from torchloom.errors import TorchLoomError
from torchloom.protocol.operator import Ask, Done, Drain
from torchloom.protocol.records import Record
from torchloom.protocol.run_records import AttemptBegan
from torchloom.protocol.subjects import Role
from torchloom.protocol.views import Answer, RankView, RunView
from torchloom.settings import Settings

LOOM = [sys.executable, "-P", "-m", "torchloom.cli.main"]
PATIENCE = 120.0
"""Seconds after which something that has not come is taken not to come. Machines may have much else to do."""
PATIENT = {"timeout": 10.0, "connect_timeout": 10.0}


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
                words = process.cmdline()
                if words and name in {Path(words[0]).name, words[-1]}:  # in a path between them it means nothing
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
            async with WeaverClient(self.settings, Role.OPERATOR, **PATIENT) as weaver:
                return next(iter((await weaver.runs(job)).runs), None)

        with contextlib.suppress(TorchLoomError):
            return asyncio.run(look())
        return None

    def ranks(self, job: str) -> tuple[RankView, ...]:
        async def look() -> tuple[RankView, ...]:
            async with WeaverClient(self.settings, Role.OPERATOR, **PATIENT) as weaver:
                return (await weaver.cluster(job)).ranks

        return asyncio.run(look())

    def standby_mb(self, job: str) -> int:
        async def look() -> int:
            async with WeaverClient(self.settings, Role.OPERATOR, **PATIENT) as weaver:
                view = await weaver.runs(job)
                return max((node.beat.standby_mb for node in view.nodes), default=0)

        with contextlib.suppress(TorchLoomError):
            return asyncio.run(look())
        return 0

    def ask(self, ask: Ask) -> Answer:
        async def asking() -> Answer:
            async with WeaverClient(self.settings, Role.OPERATOR, patience=PATIENCE, **PATIENT) as weaver:
                return await weaver.ask(ask, PATIENCE)

        return asyncio.run(asking())

    def until_it_answers(self) -> None:
        async def look() -> None:
            async with WeaverClient(self.settings, Role.OPERATOR, **PATIENT) as weaver:
                await weaver.runs("-")

        end = time.monotonic() + PATIENCE
        while True:
            try:
                return asyncio.run(look())
            except TorchLoomError:
                assert time.monotonic() < end, "the control plane does not answer"
                time.sleep(0.05)

    def attempts(self, job: str) -> list[int]:
        """Each beginning of an attempt that is in the log."""
        return [record.attempt for record in self.records() if isinstance(record, AttemptBegan) and record.job == job]

    def records(self) -> list[Record]:
        """All that is in the log."""
        return asyncio.run(read_records(self.settings))

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait(PATIENCE)


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

    def until(self, what: Callable[[], object], seconds: float = PATIENCE) -> None:
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
        """For a phase that something holds it in: another may be over between two looks."""

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

    def kill(self, first: int, *others: int) -> None:
        pids = [self.pid(rank) for rank in others]
        os.kill(self.pid(first), signal.SIGKILL)
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):  # it may have been ended for the first by now
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

    def drain(self, undo: bool = False) -> None:
        """Hold it before its next attempt: there is no node for it; or let it go on."""
        assert self.up
        found: list[RunView] = []
        self.until(lambda: self.up and (view := self.up.run(self.job)) and not found.append(view))
        node = found[0].task.node
        assert node
        assert isinstance(self.up.ask(Drain(node=node, undo=undo)), Done)

    # ── the end ──

    def end_now(self) -> tuple[int, int]:
        """Tell GLOO to end; its exit code, and the step after which all its ranks ended."""
        (self.folder / "last").touch()
        return self.end(), self.step()

    def end(self, seconds: float = PATIENCE) -> int:
        """Let it come to its end; its exit code."""
        (self.folder / "finish").touch()
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

    def records(self) -> list[Record]:
        """What the log holds of it."""
        assert self.up
        return [record for record in self.up.records() if getattr(record, "job", "") == self.job]

    def restarts(self) -> list[str]:
        return re.findall(r"loom: attempt (\d+)", self.text())

    def clear(self) -> None:
        """Whatever a failed test has left."""
        for process in (*self.census.processes(), self.process):
            with contextlib.suppress(psutil.Error, ProcessLookupError):
                process.kill()
        self.process.wait()
