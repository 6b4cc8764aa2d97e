"""`make demo`: shows what torchLoom does, on this machine, in about a minute. Needs no GPU and leaves no files."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import TypeVar

import psutil

from torchloom.bus.weaver_client import WeaverClient
from torchloom.checkpoints.store.search import latest
from torchloom.protocol.codec import decode_entry
from torchloom.protocol.records import IncidentOpened, RankJoined, RankLost, Record
from torchloom.protocol.run_records import AttemptLaunched, AttemptRunning
from torchloom.protocol.subjects import LOG, Role
from torchloom.protocol.views import ClusterView, RankView
from torchloom.settings import Settings
from torchloom.views.wording.phrases import render

EXAMPLES = Path(__file__).parent
LOOM = [sys.executable, "-m", "torchloom.cli.main"]
BOLD, DIM, PLAIN = ("\033[1m", "\033[2m", "\033[0m") if sys.stdout.isatty() else ("", "", "")
RANKS = 2
KILL_AFTER = 200
"""Steps. By then the process from which the next ranks are forked is ready."""
FREEZE_AFTER = 320
Seen = TypeVar("Seen")


def tell(text: str) -> None:
    print(f"\n{BOLD}▸ {text}{PLAIN}", flush=True)


def loom(*words: str) -> None:
    """Run a command as a user would, and show it."""
    print(f"{DIM}$ loom {' '.join(words)}{PLAIN}", flush=True)
    subprocess.run([*LOOM, *words], check=True)


class Stage:
    """The processes of the demo. All of them end with it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.settings = Settings(state=str(folder / "state"))
        self.training: dict[str, subprocess.Popen[bytes]] = {}

    def train(self, replica: str) -> subprocess.Popen[bytes]:
        script = EXAMPLES / "train_integrated.py"
        words = [sys.executable, str(script), "--job", "demo", "--replica-id", replica, "--epochs", "1000"]
        words += ["--checkpoints", str(self.kept(replica)), "--every", "20"]
        with (self.folder / f"{replica}.log").open("ab") as output:
            self.training[replica] = subprocess.Popen(words, stdout=output, stderr=output)
        return self.training[replica]

    def run(self) -> subprocess.Popen[bytes]:
        """Start a script that does not use torchLoom with `loom run`, and show its output."""
        script, folder = EXAMPLES / "simulated_training.py", str(self.folder / "runs")
        ours = ["run", "--nproc-per-node", str(RANKS), "--job", "digits", "--checkpoint-dir", folder]
        theirs = ["--epochs", "18", "--steps", "30", "--step-seconds", "0.03", "--checkpoint-interval", "50"]
        theirs += ["--checkpoint-dir", folder]
        print(f"{DIM}$ loom {' '.join([*ours, script.name, *theirs])}{PLAIN}", flush=True)
        self.training["digits"] = subprocess.Popen([*LOOM, *ours, str(script), *theirs])
        return self.training["digits"]

    def kept(self, replica: str) -> Path:
        return self.folder / f"checkpoints-{replica}"

    async def look(self) -> ClusterView:
        async with WeaverClient(self.settings, Role.VIEWER) as weaver:
            return await weaver.cluster()

    async def beating(self, replica: str, after: int = 0) -> RankView | None:
        for rank in (await self.look()).ranks:
            if rank.rank.replica == replica and rank.presence == "live" and rank.beat and rank.beat.step > after:
                return rank
        return None

    def clear(self) -> None:
        for process in self.training.values():
            if process.poll() is None:
                process.kill()
            process.wait()
        subprocess.run([*LOOM, "down", "--yes"], capture_output=True, check=False)


async def until(what: str, condition: Callable[[], Awaitable[Seen | None]], seconds: float = 60) -> Seen:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        with contextlib.suppress(Exception):  # the control plane may still be starting
            if (seen := await condition()) is not None:
                return seen
        await asyncio.sleep(0.05)
    raise SystemExit(f"the demo timed out after {seconds:.0f} s, waiting for {what}")


@contextlib.asynccontextmanager
async def listening(stage: Stage) -> AsyncIterator[Callable[[type[Record]], Awaitable[tuple[float, list[Record]]]]]:
    """Receive the decisions of the weaver as they are stored."""
    async with WeaverClient(stage.settings, Role.VIEWER) as weaver:
        entries = await weaver.client.subscribe(LOG.template)
        await weaver.client.flush()

        async def hear(kind: type[Record]) -> tuple[float, list[Record]]:
            """The time at which the next record of this kind arrived, and the records stored together with it."""
            while True:
                message = await entries.next_msg(timeout=30)
                heard = time.perf_counter()
                records = list(decode_entry(message.data).records)
                if any(isinstance(record, kind) for record in records):
                    return heard, records

        yield hear


def one(kind: type[Seen], records: list[Record]) -> Seen:
    return next(record for record in records if isinstance(record, kind))


def flip_a_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


async def show(stage: Stage) -> None:
    tell("Starting a control plane: a nats-server, and the weaver, which makes the decisions.")
    loom("up", "--detach", "--port", "0")

    tell("Starting two replicas. Each connects with one line: torchloom.attach(...).")
    for replica in ("hi", "there"):
        stage.train(replica)
    for replica in ("hi", "there"):
        await until(f"{replica} to train", lambda replica=replica: stage.beating(replica))  # type: ignore[misc]
    loom("status")

    tell("The map of devices and replicas, in both directions:")
    loom("map")

    tell("Changing the learning rate while they train: on all ranks at the same step, or on none.")
    loom("knobs", "demo")
    loom("set", "demo", "lr=5e-4")
    loom("changes", "demo")

    tell("Killing one replica with SIGKILL. It cannot report anything.")
    async with listening(stage) as hear:
        killed = time.perf_counter()
        stage.training["there"].kill()
        heard, records = await hear(RankLost)
    incident = one(IncidentOpened, records)
    print(f"{1000 * (heard - killed):.1f} ms after the kill the weaver had detected and stored it:")
    print(f"  {incident.id}: {render(incident.what)}; {render(incident.evidence[0])}")

    tell("A closed connection is not yet a death. After the grace period without a reconnection, it is:")

    async def dead() -> bool | None:
        ranks = (await stage.look()).ranks
        return True if any(r.rank.replica == "there" and r.presence == "dead" for r in ranks) else None

    await until("the death", dead)
    loom("events", "--last", "6")

    tell("Killing the weaver itself while training runs.")
    before = await stage.look()
    step = next(rank.beat.step for rank in before.ranks if rank.rank.replica == "hi" and rank.beat)
    os.kill(int(before.plane.weaver.rpartition(":")[2]), signal.SIGKILL)

    async def back() -> ClusterView | None:
        view = await stage.look()
        return view if view.plane.term > before.plane.term else None

    after = await until("the weaver", back)
    rank = await until("training to be seen again", lambda: stage.beating("hi", after=step))
    same = [(r.rank, r.incarnation, r.presence) for r in after.ranks] == [
        (r.rank, r.incarnation, r.presence) for r in before.ranks
    ] and after.incidents == before.incidents
    print(f"The weaver is back with term {after.plane.term} and {'the same state' if same else 'A DIFFERENT STATE'}.")
    print(f"Training continued in the same process, from step {step} to {rank.beat.step if rank.beat else '?'}.")
    if not same:
        raise SystemExit("the state after the restart is not the state before it")
    loom("status")

    await show_checkpoints(stage)
    stage.training["hi"].send_signal(signal.SIGINT)
    stage.training["hi"].wait()
    await show_run(stage)

    tell("Stopping the control plane.")
    loom("down")


async def show_checkpoints(stage: Stage) -> None:
    tell("Checkpoints are written in the background, here every 20 steps. An operator can request one at any time:")
    loom("checkpoint", "demo/hi")

    tell("Killing the process, and flipping one bit of its newest checkpoint, as a faulty disk would.")
    stage.training["hi"].kill()
    stage.training["hi"].wait()
    folder = stage.kept("hi")
    whole = latest(folder)
    flip_a_bit(whole.path / "state.pt")
    loom("checkpoints", str(folder), "--verify")

    tell("torch.load would not notice. torchLoom skips the damaged checkpoint and resumes from the one before:")
    stage.train("hi")
    resumed = latest(folder)
    await until("training to resume", lambda: stage.beating("hi", after=resumed.step))
    loom("events", "--job", "demo", "--last", "6")
    if resumed.step >= whole.step:
        raise SystemExit("training resumed from a damaged checkpoint")


async def show_run(stage: Stage) -> None:
    tell("Starting a job with `loom run`: two ranks that depend on each other; the script does not use torchLoom:")
    job = stage.run()

    async def at_step(step: int) -> list[RankView] | None:
        if job.poll() is not None:
            raise SystemExit("the job ended too early")
        ranks = [rank for rank in (await stage.look()).ranks if rank.rank.job == "digits" and rank.presence == "live"]
        ready = len(ranks) == RANKS and all(rank.beat and rank.beat.step >= step for rank in ranks)
        return ranks if ready else None

    ranks = await until("the job to train", lambda: at_step(KILL_AFTER))
    tell("Killing one of its ranks. The other one fails too, because its peer is gone. torchLoom restarts both:")
    async with listening(stage) as hear:
        killed = time.perf_counter()
        os.kill(ranks[-1].pid, signal.SIGKILL)
        launched = one(AttemptLaunched, (await hear(AttemptLaunched))[1])
        again, records = await hear(AttemptRunning)
        count = 0
        while count < RANKS:  # a rank without attach() joins at its first step
            joined, news = await hear(RankJoined)
            count += sum(isinstance(record, RankJoined) for record in news)
    if launched.resume_step is None:
        raise SystemExit("the job did not resume from a checkpoint")
    warm = one(AttemptRunning, records).warm
    how = "forked from a process that had already imported torch" if warm == RANKS else "started as new interpreters"
    print(f"{again - killed:.2f} s after the kill all ranks ran again, {how}.")
    print(f"{joined - killed:.2f} s after the kill both had made a step, resumed from step {launched.resume_step}.")

    ranks = await until("the job to train again", lambda: at_step(FREEZE_AFTER))
    tell("Freezing a rank with SIGSTOP. Nothing fails, but all ranks wait:")
    async with listening(stage) as hear:
        frozen = time.perf_counter()
        os.kill(ranks[0].pid, signal.SIGSTOP)
        notice, _ = await hear(IncidentOpened)
        again, _ = await hear(AttemptRunning)
    print(f"torchLoom named the rank after {notice - frozen:.2f} s; after {again - frozen:.2f} s all ranks ran again.")
    await until("the job to train again", lambda: at_step(FREEZE_AFTER))
    loom("why", "digits")
    if exit_code := job.wait():
        raise SystemExit(f"the job ended with exit code {exit_code}")


def main() -> None:
    began = time.monotonic()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in what a script starts in the background
    with tempfile.TemporaryDirectory(prefix="torchloom-demo-") as folder:
        stage = Stage(Path(folder))
        os.environ["TORCHLOOM_STATE"] = stage.settings.state
        try:
            asyncio.run(show(stage))
        finally:
            stage.clear()
    children = [p.pid for p in psutil.Process().children(recursive=True)]
    print(f"\nThe demo took {time.monotonic() - began:.0f} s and left {len(children)} processes running.")
    if children:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
