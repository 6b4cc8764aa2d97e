"""Labelled traces for the detectors: steps of a real training loop, played by several ranks, with faults put in.

The steps are recorded on the spot: a small network trained by torch on one core, the making of each batch and the
work on it timed apart, once as the machine is and once with every core busy. The ranks of a played job take stretches
of ten steps from anywhere in one recording, so that what else the machine did meanwhile is noise for all and no fault
of one; all are stretched alike, so that the median step takes 10 ms on any machine. They synchronise at each step, like
data-parallel training: a step lasts as long as its slowest rank needs.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from benchmarks.plane import child
from torchloom.protocol.rank import Beat, StepTimes

Step = tuple[float, float]
"""(seconds for the batch, seconds for the work on it)"""
LIFE = "0" * 24
STRETCH = 10
RANKS = 4
BEFORE = 60
"""Beats before anything is put in, at least."""
AFTER = 90
"""Beats after it, …"""
LONG_AFTER = 4000
"""… and after what takes long to be seen in the loss."""
LONG = ("plateau", "slow fall")
LONG_STEP: Step = (0.02, 0.18)
"""All steps of such jobs: few, and alike, because only their losses matter."""
LIMIT_MB = 64_000.0
TYPICAL = 0.01
FAULTS = ("hang", "straggler", "slowdown", "not_finite", "loss_spike", "memory", "starved", "plateau")
BENIGN = (
    "nothing", "announced evaluation", "evaluation", "collections", "stray losses", "larger cache", "slow fall",
)  # fmt: skip


# ── recording ────────────────────────────────────────────────────────────────────────────────────────────────────────


def record(seconds: float, loaded: bool) -> list[Step]:
    """Steps of a real loop; `loaded`: while every core has something else to do."""
    import torch

    torch.set_num_threads(1)
    model = torch.nn.Sequential(torch.nn.Linear(512, 1024), torch.nn.ReLU(), torch.nn.Linear(1024, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    steps: list[Step] = []
    with contextlib.ExitStack() as burners:
        for _ in range((os.cpu_count() or 1) if loaded else 0):
            burners.enter_context(child([sys.executable, "-c", "while True: pass"], dict(os.environ)))
        end = time.perf_counter() + seconds
        while (began := time.perf_counter()) < end:
            batch, labels = torch.randn(64, 512), torch.randint(0, 10, (64,))
            made = time.perf_counter()
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(batch), labels).backward()
            optimizer.step()
            steps.append((made - began, time.perf_counter() - made))
    return steps[20:]


def stretched(steps: list[Step]) -> list[Step]:
    """The same steps as if the median one took 10 ms."""
    factor = TYPICAL / statistics.median(data + own for data, own in steps)
    return [(factor * data, factor * own) for data, own in steps]


# ── playing ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass
class Trace:
    """One job, what is put into it, and what should be found."""

    kind: str
    """Of the fault, or what harmless thing happens."""
    seed: int
    record: list[Step]
    chance: random.Random = field(init=False)
    rank: int = field(init=False)
    at: int = field(init=False)
    """The beat at which it begins."""
    size: float = 0.0
    seconds: float = 0.0
    """How long a stall lasts."""

    def __post_init__(self) -> None:
        self.chance = random.Random(f"{self.kind} {self.seed}")
        self.rank = self.chance.randrange(RANKS)
        self.at = BEFORE + self.chance.randrange(40)
        self.noise = self.chance.uniform(0.01, 0.08)
        between = self.chance.uniform
        match self.kind:
            case "hang":
                self.seconds = between(5.0, 60.0)
            case "straggler":
                self.size = between(1.65, 5.0)
            case "slowdown":
                self.size = between(1.65, 4.0)
            case "loss_spike":
                self.size = between(2.0, 10.0) + 12 * self.noise
            case "memory":
                self.size = between(100.0, 500.0)  # seconds until the machine is full
            case "starved":
                self.size = between(0.6, 0.95)
            case "plateau" | "slow fall":
                self.noise = between(0.005, 0.03)
                self.size = between(0.02, 0.1)  # how far the loss falls in a thousand beats
            case "announced evaluation" | "evaluation":
                self.seconds = between(5.0, 120.0)

    @property
    def expected(self) -> set[tuple[str, int]]:
        """(kind, rank) that must be found."""
        if self.kind in ("slowdown", "starved", "plateau"):
            return {(self.kind, rank) for rank in range(RANKS)}
        return {(self.kind, self.rank)} if self.kind in FAULTS else set()

    def follows(self, kind: str, rank: int) -> bool:
        """Whether something else that is found is a consequence: all wait for a straggler or for their data."""
        return kind == "slowdown" and self.kind in ("straggler", "starved") and 0 <= rank < RANKS

    def beats(self) -> Iterator[tuple[float, list[Beat]]]:
        """What the ranks say, once a second."""
        sources = [self._steps() for _ in range(RANKS)]
        step = 0
        ended = -self.chance.uniform(5.0, 60.0)  # the first step took that long
        until = stands_until = 0.0
        durations: list[list[tuple[float, Step]]] = [[] for _ in range(RANKS)]
        drawn: list[Step] = []
        """What the ranks need for the step that is under way."""
        next_pause = self.at
        for now in range(1, self.at + (LONG_AFTER if self.kind in LONG else AFTER) + int(self.seconds)):
            while until <= now:
                if drawn:
                    for rank, parts in enumerate(drawn):
                        durations[rank].append((until - ended, parts))
                    ended, step = until, step + 1
                drawn = self._changed(until, [next(source) for source in sources])
                until += max(data + own for data, own in drawn)
                if until >= next_pause and self.seconds:
                    until += self.seconds
                    stands_until = until
                    next_pause = int(until) + 30 if self.kind == "evaluation" else sys.maxsize
                if self.kind == "collections" and self.chance.random() < 0.001:
                    until += self.chance.uniform(0.3, 1.6)
            idle_seconds, stands = now - ended, now < stands_until
            yield (
                float(now),
                [self._beat(rank, now, step, durations[rank], idle_seconds, stands) for rank in range(RANKS)],
            )
            for of_rank in durations:
                of_rank.clear()

    def _steps(self) -> Iterator[Step]:
        if self.kind in LONG:
            yield from itertools.repeat(LONG_STEP)
        while True:
            begin = self.chance.randrange(max(1, len(self.record) - STRETCH))
            yield from self.record[begin : begin + STRETCH]

    def _changed(self, at: float, ranks: list[Step]) -> list[Step]:
        """What the ranks need for a step, with the fault."""
        if at < self.at:
            return ranks
        if self.kind == "starved":
            wait = max(own for _, own in ranks) * self.size / (1 - self.size)  # all read from the same place
            return [(wait, own) for _, own in ranks]
        if self.kind in ("slowdown", "straggler"):
            slow = range(RANKS) if self.kind == "slowdown" else (self.rank,)
            return [(data, own * self.size if rank in slow else own) for rank, (data, own) in enumerate(ranks)]
        return ranks

    def _level(self, now: int) -> float:
        """The loss without its noise."""
        if self.kind == "slow fall":
            return 2.0 * float((1.0 - self.size) ** (now / 1000))
        return 2.0 * 0.999 ** (min(now, self.at) if self.kind == "plateau" else now)

    def _beat(
        self, rank: int, now: int, step: int, durations: list[tuple[float, Step]], idle_seconds: float, stands: bool
    ) -> Beat:
        here, since = rank == self.rank, now - self.at
        loss = self._level(now) * self.chance.lognormvariate(0.0, self.noise)
        memory = 20_000.0 + self.chance.gauss(0.0, 40.0)
        not_finite: tuple[str, ...] = ()
        if since >= 0 and here:
            if self.kind == "not_finite":
                not_finite = ("loss",)
            elif self.kind == "loss_spike" and since < 12:
                loss *= self.size
            elif self.kind == "memory":
                memory += since * (LIMIT_MB - 20_000.0) / self.size
            elif self.kind == "larger cache":
                memory += 25_000.0
        if self.kind == "stray losses" and self.chance.random() < 0.02:
            loss *= 2.5
        return Beat(
            incarnation=LIFE,
            step=step,
            times=_times(durations),
            loss=None if not_finite else loss,
            not_finite=not_finite,
            rss_mb=memory,
            free_mb=LIMIT_MB - memory,
            idle_seconds=idle_seconds,
            phase="eval" if stands and here and self.kind == "announced evaluation" else "",
            collectives=2 * step + (1 if stands and not here else 0),
        )


def _times(durations: list[tuple[float, Step]]) -> StepTimes | None:
    if not durations:
        return None
    steps = sorted(duration for duration, _ in durations)
    size = len(steps)
    return StepTimes(
        count=size,
        p50=steps[size // 2],
        p99=steps[min(size - 1, size * 99 // 100)],
        longest=steps[-1],
        own=sorted(own for _, (_, own) in durations)[size // 2],
        data=sorted(data for _, (data, _) in durations)[size // 2],
    )
