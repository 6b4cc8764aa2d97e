"""A soak of torchft replicas: three of them train for long while one fault after the other hits them.

Every few seconds a replica is killed, stopped, or leaves by itself; now and then two at once, one while another heals,
or the lighthouse, the weaver or the nats-server is killed. In the end every step was committed in one quorum and gave
all replicas the same parameters, to the bit; nobody who was not hit missed a step that he took part in; and nothing is
left.
"""

from __future__ import annotations

import random
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests.flow.faults import Up
from tests.flow.replicas import Replicas

COUNT = 3
PATIENCE = 90.0


@dataclass(frozen=True)
class Blow:
    kind: str
    replica: int
    pause: float
    """Seconds of training before it."""


def kill(job: Replicas, blow: Blow) -> None:
    job.strike(blow.replica)


def stop(job: Replicas, blow: Blow) -> None:
    job.strike(blow.replica, signal.SIGSTOP)


def leave(job: Replicas, blow: Blow) -> None:
    job.tell(blow.replica, "exit")


def kill_two(job: Replicas, blow: Blow) -> None:
    job.strike(blow.replica)
    job.strike((blow.replica + 1) % COUNT)


def kill_one_while_another_heals(job: Replicas, blow: Blow) -> None:
    old = job.pid(blow.replica)
    job.strike(blow.replica)
    job.until(lambda: job.pid(blow.replica) != old, PATIENCE)
    job.strike((blow.replica + 1) % COUNT)


def kill_lighthouse(job: Replicas, _: Blow) -> None:
    job.lighthouse().kill()


def kill_lighthouse_and_one(job: Replicas, blow: Blow) -> None:
    job.lighthouse().kill()
    job.strike(blow.replica)


def kill_weaver_and_one(job: Replicas, blow: Blow) -> None:
    _kill(job, "weaver")
    job.strike(blow.replica)


def kill_nats_and_one(job: Replicas, blow: Blow) -> None:
    _kill(job, "nats-server")
    job.strike(blow.replica)


def _kill(job: Replicas, name: str) -> None:
    assert job.up is not None
    job.up.kill(name)


KINDS: dict[str, tuple[int, Callable[[Replicas, Blow], None]]] = {
    "kill": (8, kill),
    "stop": (2, stop),
    "leave": (2, leave),
    "kill_two": (2, kill_two),
    "kill_one_while_another_heals": (2, kill_one_while_another_heals),
    "kill_lighthouse": (1, kill_lighthouse),
    "kill_lighthouse_and_one": (1, kill_lighthouse_and_one),
    "kill_weaver_and_one": (1, kill_weaver_and_one),
    "kill_nats_and_one": (1, kill_nats_and_one),
}
"""How often each is drawn, and what it does."""


def plan(seed: int, count: int) -> list[Blow]:
    chance = random.Random(seed)
    kinds = chance.choices(list(KINDS), [weight for weight, _ in KINDS.values()], k=count)
    return [Blow(kind, chance.randrange(COUNT), chance.uniform(5, 10)) for kind in kinds]


def run(seed: int, seconds: float) -> list[str]:
    end = time.monotonic() + seconds
    with tempfile.TemporaryDirectory() as folder:
        up = Up(Path(folder) / "plane")
        job = Replicas(Path(folder), COUNT, up=up, standby=1)
        dealt: Counter[str] = Counter()
        try:
            job.until_together(seconds=PATIENCE)
            for blow in plan(seed, 10_000):
                time.sleep(max(0.0, min(blow.pause, end - time.monotonic())))
                if time.monotonic() >= end:
                    break
                dealt[blow.kind] += 1
                KINDS[blow.kind][1](job, blow)
                for replica in range(COUNT):
                    job.until_further(replica, 5, PATIENCE)
                up.until_it_answers()
            job.until_together(seconds=PATIENCE)
            code = job.finish()
            steps = max(job.step(replica) for replica in range(COUNT))
            print(f"  {sum(dealt.values())} faults, {steps} steps, {len(job.restarts())} restarts: {dict(dealt)}")
            problems = [*job.problems(), *(f"left behind: {what}" for what in job.left())]
            return [*problems, *([f"exit code {code}:\n{job.text()[-3000:]}"] if code else [])]
        except AssertionError as error:
            return [f"after {dict(dealt)}: {error}", _where(job), *job.problems()]
        finally:
            job.clear()
            up.stop()


def _where(job: Replicas) -> str:
    """Where each replica is: its process, whether it was hit, its latest commits."""
    lines = []
    for replica in range(COUNT):
        commits = [(commit.step, commit.participants) for commit in job.latest(replica)[-3:]]
        hit = ", hit" if job.pid(replica) in job.struck else ""
        lines.append(f"replica {replica} (process {job.pid(replica)}{hit}): step and participants {commits}")
    return "; ".join(lines)
