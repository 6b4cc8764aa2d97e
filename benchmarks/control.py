"""How fast a running job is changed: `set` sent → in force on all of 4 DDP ranks, whose steps take 20 ms.

Each rank writes down when it finished each step and when it saw each value, on the clock that all processes share, so
nothing here rests on what the weaver says. For a change sent at t, with the foremost rank having finished step F at t
and the change in force from step S on:

    apply       until the last of the ranks has it
    waited      S − F, the steps that were finished meanwhile
    aborted     proposals that got the verdict abort, most of which are tried again at once, of all proposals
    mismatch    a value that was not seen by all ranks at one and the same step, or at another than was answered

In the same run, what people do without it: a file that each rank looks at once a second, and a broadcast at each step.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import secrets
import statistics
import sys
import tempfile
import time
import timeit
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.plane import child, environment, plane
from benchmarks.puppet import puppet
from benchmarks.report import finish, quantile, table
from torchloom.bus.streams import read_log
from torchloom.bus.weaver_client import WeaverClient
from torchloom.errors import Refused
from torchloom.protocol.codec import decode_entry
from torchloom.protocol.operator import SetKnobs, Steer
from torchloom.protocol.records import ChangeDecided
from torchloom.protocol.subjects import LOG_STREAM, Role
from torchloom.settings import Settings
from torchloom.threadlet.changes.knob import make_knob

RANKS = 4
FLEET = 1000
START_SECONDS = 60.0
READS = 200_000


@dataclass(frozen=True)
class Sent:
    value: float
    at: float
    step: int | None = None
    """At which it took effect, as was answered."""
    answered: float = 0.0


@dataclass(frozen=True)
class Sight:
    """What one rank wrote down."""

    steps: list[tuple[float, int]]
    values: dict[float, tuple[int, float]]
    cost: float

    @classmethod
    def read(cls, file: Path) -> Sight:
        lines = [line.split() for line in file.read_text().splitlines()]
        steps = [(float(line[2]), int(line[1])) for line in lines if line[0] == "step"]
        values = {float(line[3]): (int(line[1]), float(line[2])) for line in lines if line[0] == "x"}
        return cls(steps, values, next(float(line[1]) for line in lines if line[0] == "cost"))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.control", description=__doc__)
    parser.add_argument("--changes", type=int, default=240, help="(default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="a smoke run")
    args = parser.parse_args()
    changes = 10 if args.quick else args.changes
    chance = random.Random(args.seed)
    with plane() as settings:
        figures = live(settings, changes, chance)
        figures |= polled(settings, max(3, changes // 12), chance)
        figures |= broadcast(settings, max(5, changes // 4), chance)
        figures |= fanout(settings, 3 if args.quick else 20)
    figures["knob_read_ns"] = knob_read_ns()
    _tell(figures)
    finish("control", figures)


# ── torchLoom ────────────────────────────────────────────────────────────────────────────────────────────────────────


def live(settings: Settings, changes: int, chance: random.Random) -> dict[str, object]:
    with training("loom", settings) as folder:
        sent, refused = asyncio.run(_change(settings, changes, chance))
        aborted, proposed = asyncio.run(_verdicts(settings))
        asyncio.run(_stop(settings))
        ranks = _sights(folder)
    applied, waited, wrong = _compare(sent, ranks)
    lengths = [b[0] - a[0] for rank in ranks for a, b in zip(rank.steps, rank.steps[1:], strict=False)]
    return {
        "changes": len(sent),
        "apply_ms_p50": 1000 * quantile(applied, 0.5),
        "apply_ms_p99": 1000 * quantile(applied, 0.99),
        "answer_ms_p50": 1000 * quantile([s.answered - s.at for s in sent], 0.5),
        "steps_waited_p50": quantile(waited, 0.5),
        "steps_waited_p99": quantile(waited, 0.99),
        "step_ms_p50": 1000 * quantile(lengths, 0.5),
        "step_ms_p99": 1000 * quantile(lengths, 0.99),
        "aborted_share": aborted / proposed,
        "refused": refused,
        "mismatches": wrong,
    }


async def _change(settings: Settings, changes: int, chance: random.Random) -> tuple[list[Sent], int]:
    sent, refused, value = [], 0, 0.0
    async with WeaverClient(settings, Role.OPERATOR, timeout=30) as weaver:
        while len(sent) < changes and refused < changes:
            await asyncio.sleep(chance.uniform(0.05, 0.15))  # at any point of a step
            value += 1.0
            wanted = SetKnobs(request=secrets.token_hex(16), job="bench", values={"x": value})
            at = time.monotonic()
            try:
                done = await weaver.ask(wanted)
            except Refused:
                refused += 1
            else:
                sent.append(Sent(value, at, done.step, time.monotonic()))
    return sent, refused


async def _verdicts(settings: Settings) -> tuple[int, int]:
    """Proposals aborted, and all."""
    async with WeaverClient(settings, Role.VIEWER) as weaver:
        entries = [decode_entry(stored.data) async for stored in read_log(weaver.client, LOG_STREAM.name, 1)]
    decided = [record.commit for entry in entries for record in entry.records if isinstance(record, ChangeDecided)]
    return decided.count(False), len(decided)


def _compare(sent: list[Sent], ranks: list[Sight]) -> tuple[list[float], list[int], int]:
    """Seconds until the last rank had each value, steps waited for it, and how many were not taken alike."""
    applied, waited, wrong = [], [], 0
    for change in sent:
        seen = [rank.values.get(change.value) for rank in ranks]
        steps = {None if one is None else one[0] for one in seen}
        if len(steps) > 1 or None in steps or change.step not in {None, *steps}:
            wrong += 1
        if found := [one for one in seen if one is not None]:
            foremost = max((step for rank in ranks for at, step in rank.steps if at <= change.at), default=0)
            applied.append(max(at for _, at in found) - change.at)
            waited.append(max(step for step, _ in found) - foremost)
    return applied, waited, wrong


# ── without it ───────────────────────────────────────────────────────────────────────────────────────────────────────


def polled(settings: Settings, changes: int, chance: random.Random) -> dict[str, object]:
    applied, wrong, _ = _by_file("file", settings, changes, chance, pause=1.3)
    return {
        "file_changes": changes,
        "file_apply_ms_mean": 1000 * statistics.fmean(applied),
        "file_unequal_share": wrong / changes,
    }


def broadcast(settings: Settings, changes: int, chance: random.Random) -> dict[str, object]:
    applied, wrong, cost = _by_file("broadcast", settings, changes, chance, pause=0.1)
    return {
        "broadcast_apply_ms_p50": 1000 * quantile(applied, 0.5),
        "broadcast_unequal_share": wrong / changes,
        "broadcast_us_per_step": 1e6 * cost,
    }


def _by_file(
    how: str, settings: Settings, changes: int, chance: random.Random, pause: float
) -> tuple[list[float], int, float]:
    sent = []
    with training(how, settings) as folder:
        for number in range(1, changes + 1):
            time.sleep(pause + chance.uniform(0, 0.1))
            beside = folder / "value.new"
            beside.write_text(json.dumps({"x": float(number)}))
            beside.replace(folder / "value.json")
            sent.append(Sent(float(number), time.monotonic()))
        time.sleep(pause)
        asyncio.run(_stop(settings))
        ranks = _sights(folder)
    applied, _, wrong = _compare(sent, ranks)
    return applied, wrong, statistics.median(rank.cost for rank in ranks)


# ── many ranks, one knob ─────────────────────────────────────────────────────────────────────────────────────────────


def fanout(settings: Settings, rounds: int) -> dict[str, object]:
    """An order to a thousand ranks, each with a connection of its own: asked → all answers in and told."""
    with puppet("benchmarks.fleet", str(FLEET), env=environment(settings)) as crowd:
        crowd.ask("join")
        took = asyncio.run(_orders(settings, rounds))
        crowd.ask("pause")
    return {"fanout_1000_s": quantile(took, 0.5), "fanout_1000_s_max": max(took)}


async def _orders(settings: Settings, rounds: int) -> list[float]:
    took = []
    async with WeaverClient(settings, Role.OPERATOR, timeout=30) as weaver:
        for _ in range(rounds):
            began = time.monotonic()
            done = await weaver.ask(Steer(request=secrets.token_hex(16), verb="resume", job="fleet"))
            took.append(time.monotonic() - began)
            if f"applied on {FLEET:,} ranks" not in str(done.text):
                raise RuntimeError(f"not all answered: {done.text}")
    return took


def knob_read_ns() -> float:
    knob = make_knob("x", 0.1)
    names = {"knob": knob, "none": None}
    reading = min(timeit.repeat("knob.value", globals=names, number=READS, repeat=7))
    nothing = min(timeit.repeat("none", globals=names, number=READS, repeat=7))
    return 1e9 * (reading - nothing) / READS


# ── the ranks ────────────────────────────────────────────────────────────────────────────────────────────────────────


@contextlib.contextmanager
def training(how: str, settings: Settings) -> Iterator[Path]:
    """Four ranks under way; gone at the end."""
    with tempfile.TemporaryDirectory(prefix="loom-bench-") as name, contextlib.ExitStack() as ranks:
        folder = Path(name)
        env = environment(settings, OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo")
        for rank in range(RANKS):
            words = [sys.executable, "-m", "benchmarks.ddp_rank", how, name, str(rank), str(RANKS)]
            ranks.enter_context(child(words, env))
        asyncio.run(_started(settings))
        yield folder


async def _started(settings: Settings) -> None:
    deadline = time.monotonic() + START_SECONDS
    async with WeaverClient(settings, Role.VIEWER) as weaver:
        while time.monotonic() < deadline:
            seen = [rank for rank in (await weaver.cluster("bench")).ranks if rank.presence == "live"]
            if len(seen) == RANKS and all(rank.beat and rank.beat.step > 50 for rank in seen):
                return
            await asyncio.sleep(0.1)
    raise RuntimeError(f"the ranks did not train within {START_SECONDS:g} s")


async def _stop(settings: Settings) -> None:
    async with WeaverClient(settings, Role.OPERATOR, timeout=30) as weaver:
        await weaver.ask(Steer(request=secrets.token_hex(16), verb="stop", job="bench"))
        while any(rank.presence == "live" for rank in (await weaver.cluster("bench")).ranks):
            await asyncio.sleep(0.05)


def _sights(folder: Path) -> list[Sight]:
    return [Sight.read(folder / f"rank{rank}") for rank in range(RANKS)]


def _tell(f: dict[str, object]) -> None:
    steps = f"steps of {f['step_ms_p50']:.1f} ms, p99 {f['step_ms_p99']:.1f}"
    table(
        f"{f['changes']} changes of {RANKS} DDP ranks, {steps}",
        [
            ("", "applied, ms", "p99", "at unequal steps", "cost of a step"),
            ("torchLoom", f["apply_ms_p50"], f["apply_ms_p99"], f["mismatches"], f"{f['knob_read_ns']:.0f} ns"),
            ("broadcast each step", f["broadcast_apply_ms_p50"], "", f"{f['broadcast_unequal_share']:.0%}",
             f"{f['broadcast_us_per_step']:.0f} µs"),
            ("file, looked at each second", f["file_apply_ms_mean"], "", f"{f['file_unequal_share']:.0%}", ""),
        ],
    )  # fmt: skip
    table(
        "of torchLoom's",
        [
            ("answered, ms p50", f["answer_ms_p50"]),
            ("steps waited, p50", f["steps_waited_p50"]),
            ("steps waited, p99", f["steps_waited_p99"]),
            ("proposals aborted", f"{f['aborted_share']:.2%}"),
            ("refused", f["refused"]),
            (f"order to {FLEET:,} ranks, s", f["fanout_1000_s"]),
            ("worst", f["fanout_1000_s_max"]),
        ],
    )


if __name__ == "__main__":
    main()
