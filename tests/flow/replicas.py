"""A training of torchft replicas to be hit: `loom run --torchft`, seen and struck from outside, and what must hold.

Every rank writes down each commit (process, step, quorum, participants, the hash of all parameters) and each step that
it discarded (process, step, quorum). It trains until the file `last` names a step that it has reached, and does what a
file `do-REPLICA-RANK` says: exit, raise, hang, or slow with the seconds of a step. Parameters begin differently in each
replica, so that equal ones can only come from healing.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import signal
import subprocess
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import psutil

from tests.flow.census import Census
from tests.flow.faults import LOOM, Up

SCRIPT = """
import hashlib, os, sys, time
from datetime import timedelta
from pathlib import Path
import torch
from torchft import Manager, ProcessGroupGloo
import torchloom

folder, number, rank = Path(sys.argv[1]), os.environ["REPLICA_GROUP_ID"], os.environ["RANK"]
torch.set_num_threads(1)
torch.manual_seed(os.getpid())
model = torch.nn.Linear(32, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

def load(state):
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])

manager = Manager(
    pg=ProcessGroupGloo(timeout=timedelta(seconds=10)),  # so long gloo waits for one that died while it connects
    load_state_dict=load,
    state_dict=lambda: {"model": model.state_dict(), "optimizer": optimizer.state_dict()},
    min_replica_size=int(os.environ.get("LEAST", "1")),
    replica_id=f"train_ddp_{number}",
    timeout=timedelta(seconds=15),
)
loom = torchloom.attach_manager(manager)
commits, last, order = (folder / name for name in (f"commits-{number}-{rank}", "last", f"do-{number}-{rank}"))
pause = 0.02
with commits.open("a", buffering=1) as told:
    told.write(f"{os.getpid()} began\\n")
    while not loom.stopping and not (last.exists() and manager.current_step() >= int(last.read_text() or 1 << 30)):
        manager.start_quorum()
        chance = torch.Generator().manual_seed(manager.current_step() * 1000 + int(number))
        optimizer.zero_grad()
        model(torch.randn(4, 32, generator=chance)).square().mean().backward()
        for parameter in model.parameters():
            manager.allreduce(parameter.grad).wait()
        if manager.should_commit():
            optimizer.step()
            values = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
            digest = hashlib.sha256(values).hexdigest()[:16]
            count, quorum = manager.num_participants(), manager._quorum_id
            told.write(f"{os.getpid()} {manager.current_step()} {quorum} {count} {digest} {time.monotonic():.6f}\\n")
        else:
            told.write(f"{os.getpid()} discarded {manager.current_step() + 1} {manager._quorum_id}\\n")
        if order.exists() and (word := order.read_text()):
            order.unlink()
            if word == "exit":
                os._exit(1)
            if word == "raise":
                raise ValueError("as it was told")
            if word == "hang":  # in its next forward pass
                time.sleep(10_000)
            if word.startswith("slow"):
                pause = float(word.split()[1])
        time.sleep(pause)
    told.write(f"{os.getpid()} ended\\n")
manager.shutdown(wait=False)
"""


class Commit(NamedTuple):
    pid: int
    step: int
    quorum: int
    participants: int
    digest: str
    at: float


class Replicas:
    def __init__(
        self, folder: Path, count: int = 2, ranks: int = 1, *words: str, up: Up | None = None, least: int = 1,
        standby: int = 0,
    ) -> None:  # fmt: skip
        self.folder, self.count, self.ranks, self.up = folder, count, ranks, up
        self.job = f"job-{secrets.token_hex(3)}"
        self.census = Census.take(folder / "tmp")
        self.pids: set[int] = set()
        self.struck: set[int] = set()
        """Processes that were hit: what they did not do is no wonder."""
        self.output = folder / "output.txt"
        self.env = {k: v for k, v in os.environ.items() if not k.startswith(("TORCHLOOM_", "TORCHFT_"))}
        self.env |= {"TORCHLOOM_STATE": up.settings.state if up else str(folder / "state"), "OMP_NUM_THREADS": "1"}
        self.env |= self.census.env | {"LEAST": str(least)}
        (folder / "train.py").write_text(SCRIPT)
        command = [*LOOM, "run", "--job", self.job, "--torchft", "--replicas", str(count)]
        command += ["--nproc-per-node", str(ranks), "--min-replicas", str(least), "--standby", str(standby)]
        command += ["--max-restarts", "1000", *words, str(folder / "train.py"), str(folder)]
        with self.output.open("wb") as output:
            self.process = subprocess.Popen(command, env=self.env, stdout=output, stderr=output, cwd=folder)

    # ── looking ──

    def text(self) -> str:
        return self.output.read_text(errors="replace")

    def until(self, what: Callable[[], object], seconds: float = 60.0) -> None:
        end = time.monotonic() + seconds
        while not what():
            assert time.monotonic() < end, f"not in {seconds} s:\n{self.text()[-6000:]}"
            assert self.process.poll() is None or what(), f"it is over:\n{self.text()[-6000:]}"
            time.sleep(0.02)

    def lines(self, replica: int, rank: int = 0) -> list[list[str]]:
        with contextlib.suppress(FileNotFoundError):
            whole = (self.folder / f"commits-{replica}-{rank}").read_text().rpartition("\n")[0]
            return [line.split() for line in whole.splitlines()]
        return []

    def commits(self, replica: int, rank: int = 0) -> list[Commit]:
        return [
            Commit(int(pid), int(step), int(quorum), int(count), digest, float(at))
            for pid, step, quorum, count, digest, at in (line for line in self.lines(replica, rank) if len(line) == 6)
        ]

    def pid(self, replica: int, rank: int = 0) -> int:
        return int(self.lines(replica, rank)[-1][0])

    def latest(self, replica: int) -> list[Commit]:
        """The last commits of its latest life."""
        pid, found = self.pid(replica), self.commits(replica)[-200:]
        return [commit for commit in found if commit.pid == pid]

    def step(self, replica: int) -> int:
        found = self.commits(replica)
        return found[-1].step if found else 0

    def until_together(self, commits: int = 10, count: int | None = None, seconds: float = 180.0) -> None:
        """So many commits that all replicas have made together, each in its latest life."""
        count = self.count if count is None else count

        def there() -> bool:
            alive = [n for n in range(self.count) if self.pid(n) not in self.struck]
            latest = [self.latest(n)[-commits:] for n in alive]
            going = [some for some in latest if len(some) == commits and all(c.participants == count for c in some)]
            return len(going) == count and max(s[-1].step for s in going) - min(s[-1].step for s in going) < 5

        self.until(lambda: all(self.lines(n) for n in range(self.count)), seconds)
        self.until(there, seconds)

    def until_further(self, replica: int, steps: int = 10, seconds: float = 60.0) -> None:
        goal = self.step(replica) + steps
        self.until(lambda: self.step(replica) >= goal, seconds)

    # ── striking ──

    def strike(self, replica: int, number: int = signal.SIGKILL, rank: int | None = None) -> None:
        for one in range(self.ranks) if rank is None else [rank]:
            pid = self.pid(replica, one)
            self.struck |= {self.pid(replica, other) for other in range(self.ranks)}
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def tell(self, replica: int, order: str, rank: int = 0) -> None:
        if not order.startswith("slow"):
            self.struck |= {self.pid(replica, other) for other in range(self.ranks)}
        beside = self.folder / f"beside-{replica}-{rank}"
        beside.write_text(order)
        beside.rename(self.folder / f"do-{replica}-{rank}")

    def lighthouse(self) -> psutil.Process:
        for process in psutil.Process(self.process.pid).children(recursive=True):
            with contextlib.suppress(psutil.Error):
                if "torchloom.lighthouse" in process.cmdline():
                    return process
        raise AssertionError("there is no lighthouse")

    # ── the end ──

    def finish(self, further: int = 20, seconds: float = 120.0) -> int:
        """Let it train on a while and end; its exit code."""
        goal = max(self.step(n) for n in range(self.count)) + further
        beside = self.folder / "beside"
        beside.write_text(str(goal))
        beside.rename(self.folder / "last")
        self.pids |= {process.pid for process in self.census.processes()}
        return self.process.wait(seconds)

    def left(self) -> list[str]:
        lives = {int(line[0]) for n in range(self.count) for r in range(self.ranks) for line in self.lines(n, r)}
        return self.census.left(self.pids | lives, set())

    def clear(self) -> None:
        for process in (*self.census.processes(), self.process):
            with contextlib.suppress(psutil.Error, ProcessLookupError):
                process.kill()
        self.process.wait()

    # ── what must hold ──

    def problems(self) -> list[str]:
        return list(self._problems())

    def _problems(self) -> Iterator[str]:
        by_step: dict[int, list[tuple[int, Commit]]] = defaultdict(list)
        healed: set[tuple[int, int]] = set()
        """Who commits a step, and not the one before, got there by healing: it takes part from the next one on."""
        for replica in range(self.count):
            mine = self.commits(replica)
            before: dict[int, int] = {}
            for commit in mine:
                by_step[commit.step].append((replica, commit))
                if before.get(commit.pid) != commit.step - 1:
                    healed.add((commit.pid, commit.step))
                before[commit.pid] = commit.step
            for a, b in zip(mine, mine[1:], strict=False):
                if b.quorum < a.quorum and a.pid == b.pid:
                    yield f"replica {replica}: quorum {b.quorum} after {a.quorum}"
                if a.pid == b.pid and b.step <= a.step:
                    yield f"replica {replica}: step {b.step} after {a.step}"
        for step, made in sorted(by_step.items()):
            if len({commit.digest for _, commit in made}) > 1:
                yield f"step {step}: parameters differ: {[(r, c.quorum, c.digest) for r, c in made]}"
            if len({commit.quorum for _, commit in made}) > 1:
                yield f"step {step} was committed in several quorums: {[(r, c.quorum) for r, c in made]}"
            took_part = [replica for replica, commit in made if (commit.pid, step) not in healed]
            if len(took_part) > max(commit.participants for _, commit in made):
                yield f"step {step}: {took_part} of {[r for r, _ in made]} took part, not {made[0][1].participants}"
        yield from self._lonely(by_step)

    def _lonely(self, by_step: dict[int, list[tuple[int, Commit]]]) -> Iterator[str]:
        """Steps that fewer replicas committed than took part, if one of those that are missing has no excuse.

        One excuse is that the replica was hit. The other one is how torchft works: a vote is that of one replica group
        ("Different replica groups may return different values", Manager.should_commit), and a replica votes for a step
        if no error was reported in its own ranks. When a member is killed in an all-reduce, those that have received
        all their data by then complete it and commit; those that still wait for data of the dead member, or of one that
        gave up, get an error, from the broken connection or from our abort (QuorumAborter), and discard. (With gloo
        alone, one of four members stopped at a random moment: of 200 times the other three had completed different
        numbers of all-reduces 23 times, and 10 times one alone was ahead.) An abort takes back nothing: an all-reduce
        that is complete stays complete, and ProcessGroupGloo.errored() is None. In the next quorum those that committed
        have the greatest step, and the others heal from them: they commit its first step without taking part in it.
        tests/integrations/torchft/test_votes.py shows all of this but the kill with torchft alone.
        """
        for step, made in sorted(by_step.items()):
            commit = made[0][1]
            missing = commit.participants - len(made)
            if missing <= 0:
                continue
            absent = [n for n in range(self.count) if n not in {replica for replica, _ in made}]
            excused = [n for n in absent if any(c.pid in self.struck for c in self.commits(n)) or not self.commits(n)]
            if self._lost_a_member(commit.quorum):
                excused += [n for n in absent if n not in excused and self._discarded_and_healed(n, made)]
            if len(excused) < missing:
                yield f"step {step}: {missing} of {commit.participants} did not commit, and were not hit"

    def _lost_a_member(self, quorum: int) -> bool:
        """Whether a process that committed in this quorum was hit."""
        return any(c.quorum == quorum and c.pid in self.struck for n in range(self.count) for c in self.commits(n))

    def _discarded_and_healed(self, replica: int, made: list[tuple[int, Commit]]) -> bool:
        """Whether a replica discarded a step in the quorum in which others committed it, and in the next quorum that
        commits anything, in the same process, commits the step after it, together with one of these others."""
        _, missed = made[0]
        later = [(n, c) for n in range(self.count) for c in self.commits(n) if c.quorum > missed.quorum]
        following = min((c.quorum for _, c in later), default=None)
        first = [(n, c.pid) for n, c in later if (c.quorum, c.step) == (following, missed.step + 1)]
        return any((n, c.pid) in first for n, c in made) and any(
            [str(pid), "discarded", str(missed.step), str(missed.quorum)] in self.lines(n)
            for n, pid in first
            if n == replica
        )

    def restarts(self) -> list[str]:
        return re.findall(r"loom: (\d+): attempt \d+ begins", self.text())
