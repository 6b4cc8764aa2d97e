"""`make demo`: what torchLoom does, shown on this machine in a minute or two. It needs no GPU, and leaves nothing."""

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

from torchloom.bus.asking import Asking
from torchloom.checkpoints.search import latest
from torchloom.messages import (
    AttemptLaunched,
    AttemptRunning,
    FabricView,
    IncidentOpened,
    RankJoined,
    RankLost,
    RankView,
    Record,
    decode_entry,
)
from torchloom.settings import Settings
from torchloom.subjects import LOG, Role

EXAMPLES = Path(__file__).parent
LOOM = [sys.executable, "-m", "torchloom.cli.main"]
BOLD, DIM, PLAIN = ("\033[1m", "\033[2m", "\033[0m") if sys.stdout.isatty() else ("", "", "")
RANKS = 2
KILL_AFTER = 200
"""Steps: by then the process that the next ranks are forked from has long been ready."""
FREEZE_AFTER = 320
Seen = TypeVar("Seen")


def tell(text: str) -> None:
    print(f"\n{BOLD}▸ {text}{PLAIN}", flush=True)


def loom(*words: str) -> None:
    """Run a command as you would, and show it."""
    print(f"{DIM}$ loom {' '.join(words)}{PLAIN}", flush=True)
    subprocess.run([*LOOM, *words], check=True)


class Stage:
    """The processes of the demo; whatever happens, none of them outlives it."""

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
        """Let torchLoom start a script that knows nothing of it, and show what it prints."""
        script, folder = EXAMPLES / "simulated_training.py", str(self.folder / "runs")
        ours = ["run", "--nproc-per-node", str(RANKS), "--job", "digits", "--checkpoint-dir", folder]
        theirs = ["--epochs", "18", "--steps", "30", "--step-seconds", "0.03", "--checkpoint-interval", "50"]
        theirs += ["--checkpoint-dir", folder]
        print(f"{DIM}$ loom {' '.join([*ours, script.name, *theirs])}{PLAIN}", flush=True)
        self.training["digits"] = subprocess.Popen([*LOOM, *ours, str(script), *theirs])
        return self.training["digits"]

    def kept(self, replica: str) -> Path:
        return self.folder / f"checkpoints-{replica}"

    async def look(self) -> FabricView:
        async with Asking(self.settings, Role.VIEWER) as weaver:
            return await weaver.fabric()

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
        with contextlib.suppress(Exception):  # the control plane may be just coming up
            if (seen := await condition()) is not None:
                return seen
        await asyncio.sleep(0.05)
    raise SystemExit(f"the demo waited {seconds:.0f} s in vain for {what}")


@contextlib.asynccontextmanager
async def listening(stage: Stage) -> AsyncIterator[Callable[[type[Record]], Awaitable[tuple[float, list[Record]]]]]:
    """Hear what the weaver decides, as it decides it."""
    async with Asking(stage.settings, Role.VIEWER) as weaver:
        entries = await weaver.client.subscribe(LOG.template)
        await weaver.client.flush()

        async def hear(kind: type[Record]) -> tuple[float, list[Record]]:
            """When the next record of this kind was heard of, and what was decided together with it."""
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
    tell("A control plane comes up: a nats-server of its own and the weaver, which decides.")
    loom("up", "--detach", "--port", "0")

    tell("Two replicas begin to train. Each joins with one line: torchloom.attach(...).")
    for replica in ("hi", "there"):
        stage.train(replica)
    for replica in ("hi", "there"):
        await until(f"{replica} to train", lambda replica=replica: stage.beating(replica))  # type: ignore[misc]
    loom("status")

    tell("Which device carries which replica, both ways:")
    loom("map")

    tell("A value is changed while they train: on all ranks at the same step, or on none.")
    loom("knobs", "demo")
    loom("set", "demo", "lr=5e-4")
    loom("changes", "demo")

    tell("Now one of them is killed: SIGKILL, no last word.")
    async with listening(stage) as hear:
        killed = time.perf_counter()
        stage.training["there"].kill()
        heard, records = await hear(RankLost)
    incident = one(IncidentOpened, records)
    print(f"{1000 * (heard - killed):.1f} ms after the kill the weaver had decided and stored it:")
    print(f"  {incident.id}: {incident.what}; {incident.evidence[0]}")

    tell("A link that closed is not yet a death. It did not come back, so:")

    async def dead() -> bool | None:
        ranks = (await stage.look()).ranks
        return True if any(r.rank.replica == "there" and r.presence == "dead" for r in ranks) else None

    await until("the death", dead)
    loom("events", "--last", "6")

    tell("Now the weaver itself is killed, in the middle of it all.")
    before = await stage.look()
    step = next(rank.beat.step for rank in before.ranks if rank.rank.replica == "hi" and rank.beat)
    os.kill(int(before.plane.weaver.rpartition(":")[2]), signal.SIGKILL)

    async def back() -> FabricView | None:
        view = await stage.look()
        return view if view.plane.term > before.plane.term else None

    after = await until("the weaver", back)
    rank = await until("training to be seen again", lambda: stage.beating("hi", after=step))
    same = [(r.rank, r.incarnation, r.presence) for r in after.ranks] == [
        (r.rank, r.incarnation, r.presence) for r in before.ranks
    ] and after.incidents == before.incidents
    print(f"It is back as term {after.plane.term}, {'with the same state' if same else 'WITH ANOTHER STATE'}.")
    print(f"Training went on meanwhile: from step {step} to {rank.beat.step if rank.beat else '?'}, the same process.")
    if not same:
        raise SystemExit("the state after the restart is not the state before it")
    loom("status")

    await show_checkpoints(stage)
    stage.training["hi"].send_signal(signal.SIGINT)
    stage.training["hi"].wait()
    await show_run(stage)

    tell("Everything is taken down.")
    loom("down")


async def show_checkpoints(stage: Stage) -> None:
    tell("Checkpoints are written behind the training, every 20 steps here. An operator may want one at once:")
    loom("checkpoint", "demo/hi")

    tell("The process is killed, and one bit of its newest checkpoint flips, as on a disk that forgets.")
    stage.training["hi"].kill()
    stage.training["hi"].wait()
    folder = stage.kept("hi")
    whole, _ = latest(folder)
    flip_a_bit(whole.path / "state.pt")
    loom("checkpoints", str(folder), "--verify")

    tell("torch.load looks at no checksum. Here training, started again, goes on from the one before:")
    stage.train("hi")
    resumed, _ = latest(folder)
    await until("training to go on", lambda: stage.beating("hi", after=resumed.step))
    loom("events", "--job", "demo", "--last", "6")
    if resumed.step >= whole.step:
        raise SystemExit("it went on from a damaged checkpoint")


async def show_run(stage: Stage) -> None:
    tell("torchLoom can start a job, too. This one has two ranks that need each other, and knows nothing of torchLoom:")
    job = stage.run()

    async def at_step(step: int) -> list[RankView] | None:
        if job.poll() is not None:
            raise SystemExit("the job ended before anything could happen to it")
        ranks = [rank for rank in (await stage.look()).ranks if rank.rank.job == "digits" and rank.presence == "live"]
        ready = len(ranks) == RANKS and all(rank.beat and rank.beat.step >= step for rank in ranks)
        return ranks if ready else None

    ranks = await until("the job to train", lambda: at_step(KILL_AFTER))
    tell("One of its ranks is killed. The other fails for want of it, and says so. No one has to do anything:")
    async with listening(stage) as hear:
        killed = time.perf_counter()
        os.kill(ranks[-1].pid, signal.SIGKILL)
        launched = one(AttemptLaunched, (await hear(AttemptLaunched))[1])
        again, records = await hear(AttemptRunning)
        known = 0
        while known < RANKS:  # such a rank joins at its first step
            joined, news = await hear(RankJoined)
            known += sum(isinstance(record, RankJoined) for record in news)
    if launched.resume_step is None:
        raise SystemExit("it went on from no checkpoint")
    warm = one(AttemptRunning, records).warm
    how = "forked from a process that had imported torch already" if warm == RANKS else "started as fresh interpreters"
    print(f"{again - killed:.2f} s after the kill all ranks ran again, {how};")
    print(f"{joined - killed:.2f} s after it the weaver knew that they train, from step {launched.resume_step} on.")

    tell("Worse than a rank that dies is one that freezes: nothing fails, all wait. One is stopped with SIGSTOP:")
    ranks = await until("the job to train again", lambda: at_step(FREEZE_AFTER))
    async with listening(stage) as hear:
        frozen = time.perf_counter()
        os.kill(ranks[0].pid, signal.SIGSTOP)
        known, _ = await hear(IncidentOpened)
        again, _ = await hear(AttemptRunning)
    print(
        f"{known - frozen:.2f} s later it was known who is to blame; after {again - frozen:.2f} s all ranks ran again."
    )
    loom("why", "digits")
    if ended := job.wait():
        raise SystemExit(f"the job ended with exit code {ended}")


def main() -> None:
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="torchloom-demo-") as folder:
        stage = Stage(Path(folder))
        os.environ["TORCHLOOM_STATE"] = stage.settings.state
        try:
            asyncio.run(show(stage))
        finally:
            stage.clear()
    left = [p.pid for p in psutil.Process().children(recursive=True)]
    print(f"\n{len(left)} processes left behind. The demo took {time.monotonic() - began:.0f} s.")
    if left:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
