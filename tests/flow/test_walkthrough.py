"""The walk of docs/walkthrough.md with real processes: replicas by plain torchrun, and by `loom run --torchft`.

The heartbeat timeout of the lighthouse is ten minutes here: whoever goes on does so because somebody was evicted.
"""

from __future__ import annotations

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
import pytest

from tests.flow.census import Census
from tests.flow.faults import LOOM, PATIENCE, Up
from tests.flow.slurm import free_ports
from torchloom.protocol.rank import MemberHealed, MemberJoined
from torchloom.protocol.records import MembersEvicted, RankJoined

pytest.importorskip("torchft", reason="torchft is not installed (its wheel is for Linux on x86_64 alone)")
pytestmark = pytest.mark.long

EXAMPLE = Path(__file__).parents[2] / "examples" / "train_ddp.py"
WORDS = ["--steps", "1000000", "--step-seconds", "0.02", "--log-interval", "1"]
UNKNOWN = 4
"""The exit code of a command about something that nobody knows."""


class Walk:
    """One job: a lighthouse, replicas started one by one or all by `loom run`, and what is seen of them."""

    def __init__(self, folder: Path, up: Up) -> None:
        self.folder, self.up = folder, up
        self.job = f"job-{secrets.token_hex(3)}"
        self.census = Census.take(folder / "tmp")
        self.env = {k: v for k, v in up.env.items() if not k.startswith("TORCHFT_")} | self.census.env
        self.env |= {"TORCHLOOM_JOB": self.job, "NUM_REPLICA_GROUPS": "2", "OMP_NUM_THREADS": "1"}
        self.env["RUST_LOG"] = "info"  # torchft tells only there that it was refused
        self.outputs: dict[int, Path] = {}
        self.launchers: dict[int, subprocess.Popen[bytes]] = {}
        self.started = 0

    # ── starting ──

    def start(self, name: str, *command: str, **env: str) -> tuple[subprocess.Popen[bytes], Path]:
        self.started += 1
        path = self.folder / f"{name}-{self.started}.txt"
        with path.open("wb") as output:
            started = subprocess.Popen(command, env=self.env | env, stdout=output, stderr=output, cwd=self.folder)
        return started, path

    def lighthouse(self) -> None:
        words = ["--job", self.job, "--bind", "127.0.0.1:0", "--min-replicas", "1", "--quorum-tick-ms", "100"]
        words += ["--join-timeout-ms", "10000", "--heartbeat-timeout-ms", "600000"]
        _, output = self.start("lighthouse", *LOOM, "lighthouse", *words)
        self.until(lambda: "evictions are received through NATS" in text(output))
        found = re.search(r"TORCHFT_LIGHTHOUSE=(\S+)", text(output))
        assert found is not None, text(output)
        self.env["TORCHFT_LIGHTHOUSE"] = found[1]

    def torchrun(self, replica: int) -> None:
        (port,) = free_ports(1)
        words = [f"--master_port={port}", "--nnodes=1", "--nproc_per_node=1", "--", str(EXAMPLE), *WORDS]
        command = [sys.executable, "-m", "torch.distributed.run", *words]
        started = self.start(f"replica-{replica}", *command, REPLICA_GROUP_ID=str(replica))
        self.launchers[replica], self.outputs[replica] = started

    def loom(self, *words: str) -> tuple[int, str]:
        done = subprocess.run(
            [*LOOM, *words], env=self.env, capture_output=True, text=True, timeout=PATIENCE, check=False
        )
        return done.returncode, done.stdout + done.stderr

    # ── looking ──

    def until(self, what: Callable[[], object]) -> None:
        end = time.monotonic() + PATIENCE
        while not what():
            told = "\n".join(f"{path.name}:\n{text(path)[-2000:]}" for path in sorted(self.folder.glob("*-*.txt")))
            assert time.monotonic() < end, f"not in {PATIENCE} s:\n{told}"
            time.sleep(0.1)

    def steps(self, replica: int) -> list[tuple[int, int]]:
        """What it has committed in this life: the step, and how many replicas took part."""
        found = re.findall(r"^step +(\d+) .* replicas (\d+)$", text(self.outputs[replica]), re.MULTILINE)
        return [(int(step), int(count)) for step, count in found]

    def last(self, replica: int) -> int:
        return max((step for step, _ in self.steps(replica)), default=0)

    def until_together(self) -> None:
        """Until both have committed ten steps together, and the weaver has heard that both have trained."""

        def there() -> bool:
            latest = [self.steps(replica)[-10:] for replica in (0, 1)]
            return all(len(some) == 10 and all(count == 2 for _, count in some) for some in latest)

        self.until(there)
        self.until(lambda: self.trained() >= {"train_ddp_0", "train_ddp_1"})

    def trained(self) -> set[str]:
        """The replicas whose beats have told of a step. Beats come once a second, later than the first steps."""
        return {view.rank.replica for view in self.up.ranks(self.job) if view.beat is not None and view.beat.step > 0}

    def until_further(self, replica: int, steps: int = 20) -> None:
        goal = self.last(replica) + steps
        self.until(lambda: self.last(replica) >= goal)

    def members(self, replica: int) -> list[str]:
        """torchft's ids of all its lives."""
        joined = [r for r in self.up.records() if isinstance(r, MemberJoined) and r.rank.job == self.job]
        return [record.member for record in joined if record.rank.replica == f"train_ddp_{replica}"]

    def pid(self, replica: int) -> int:
        joined = [r for r in self.up.records() if isinstance(r, RankJoined) and r.rank.job == self.job]
        return [record.hello.pid for record in joined if record.rank.replica == f"train_ddp_{replica}"][-1]

    def evicted(self) -> list[tuple[str, str]]:
        """Every member that was, and the code of why, in this order."""
        records = [r for r in self.up.records() if isinstance(r, MembersEvicted) and r.job == self.job]
        return [(member, getattr(record.reason, "code", "")) for record in records for member in record.members]

    def healed(self, replica: int) -> list[MemberHealed]:
        records = [r for r in self.up.records() if isinstance(r, MemberHealed) and r.rank.job == self.job]
        return [record for record in records if record.rank.replica == f"train_ddp_{replica}"]

    def clear(self) -> None:
        for process in self.census.processes():
            with contextlib.suppress(psutil.Error):
                process.kill()


def text(path: Path) -> str:
    return path.read_text(errors="replace")


@pytest.fixture
def walk(tmp_path: Path, up: Up) -> Iterator[Walk]:
    made = Walk(tmp_path, up)
    yield made
    made.clear()


@pytest.fixture
def two(walk: Walk) -> Walk:
    """Two replicas by torchrun that train together."""
    walk.lighthouse()
    walk.torchrun(0)
    walk.torchrun(1)
    walk.until_together()
    return walk


def test_replicas_of_torchrun_register_leave_and_heal(two: Walk) -> None:
    (first,), (second,) = two.members(0), two.members(1)
    _, events = two.loom("events", "--job", two.job)
    for number, member in enumerate((first, second)):
        assert re.fullmatch(rf"train_ddp_{number}:[0-9a-f-]{{36}}", member)
        assert re.search(rf"Registered device: \S+ for replica_id: {member}", events), events
    before = len(two.healed(1))

    two.launchers[1].send_signal(signal.SIGINT)  # as Ctrl-C does
    two.until(two.evicted)
    assert two.evicted() == [(second, "life_interrupted")]
    two.until_further(0)
    assert two.steps(0)[-1][1] == 1

    two.launchers[1].wait(PATIENCE)
    reached = two.last(0)
    two.torchrun(1)
    two.until_together()
    assert len(two.members(1)) == 2, "it has another id in its second life"
    two.until(lambda: len(two.healed(1)) > before)
    assert two.healed(1)[-1].source == "train_ddp_0"
    assert two.healed(1)[-1].step >= reached
    assert two.members(0) == [first]


def test_one_of_torchrun_that_is_killed_is_missed_at_once_where_the_weaver_runs(two: Walk) -> None:
    (killed,) = two.members(1)
    os.kill(two.launchers[1].pid, signal.SIGKILL)  # or it would start the next life
    os.kill(two.pid(1), signal.SIGKILL)
    two.until_further(0)
    assert two.steps(0)[-1][1] == 1
    assert two.evicted() == [(killed, "rank_process_ended")]


def test_a_device_that_fails_evicts_exactly_the_replicas_on_it(two: Walk) -> None:
    assert two.loom("fail", "GPU-nosuch")[0] == UNKNOWN
    assert two.evicted() == []
    two.until_further(1)
    assert two.steps(1)[-1][1] == 2

    gpu = f"GPU-{two.job}"
    assert two.loom("register", gpu, f"{two.job}/train_ddp_1")[0] == 0
    code, said = two.loom("fail", gpu, "--cause", "XID 79")
    assert code == 0, said
    assert two.evicted() == [(two.members(1)[0], "device_failed")]
    two.until_further(0)
    assert two.steps(0)[-1][1] == 1
    assert len(two.members(0)) == 1


def test_a_zombie_that_wakes_up_commits_nothing_more(two: Walk) -> None:
    pid = two.pid(1)
    os.kill(pid, signal.SIGSTOP)
    two.until(lambda: psutil.Process(pid).status() == psutil.STATUS_STOPPED)
    stopped = two.last(1)
    code, said = two.loom("evict", f"{two.job}/train_ddp_1", "--yes")
    assert code == 0, said
    two.until_further(0)
    assert two.steps(0)[-1][1] == 1

    os.kill(pid, signal.SIGCONT)
    two.until(lambda: "was evicted from the job" in text(two.outputs[1]))  # it has asked, and was refused
    two.until_further(0, 50)
    assert two.last(1) <= stopped + 1, "beyond the step that was under way when it was stopped"
    assert two.steps(0)[-1][1] == 1
    assert [member for member, _ in two.evicted()] == two.members(1)


def test_loom_run_starts_them_and_replaces_one_that_is_killed(walk: Walk) -> None:
    command = ["run", "--job", walk.job, "--torchft", "--replicas", "2", "--standby", "0", str(EXAMPLE), *WORDS]
    process, output = walk.start("run", *LOOM, *command)

    def counts(replica: int) -> list[str]:
        """How many replicas took part in each step that it committed."""
        return re.findall(rf"^\[{replica}/0\] step .* replicas (\d+)$", text(output), re.MULTILINE)

    def together() -> bool:
        return all(counts(replica)[-10:] == ["2"] * 10 for replica in (0, 1))

    def joined(replica: int) -> list[RankJoined]:
        found = [r for r in walk.up.records() if isinstance(r, RankJoined) and r.rank.job == walk.job]
        return [record for record in found if record.rank.replica == f"{walk.job}_{replica}"]

    walk.until(together)
    before = len(counts(0))
    os.kill(joined(1)[-1].hello.pid, signal.SIGKILL)
    walk.until(lambda: "1" in counts(0)[before:])
    walk.until(lambda: len(joined(1)) == 2)
    walk.until(together)
    assert len(joined(0)) == 1
    assert [why for _, why in walk.evicted()] == ["rank_of_run_failed"]
    process.send_signal(signal.SIGINT)
    process.wait(PATIENCE)
