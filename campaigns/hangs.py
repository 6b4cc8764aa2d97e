"""Troubles on real ranks: one training of two gloo ranks after the other gets into trouble again and again.

A plan is drawn from the seed: what happens, to which rank. Of each trouble the right verdict must be known, with the
right culprit and, of a hang, the stacks of both ranks; the policy's response must follow, once. What only looks like
trouble must end nobody. In the end the parameters must be those of a training that nothing happened to, to the bit, and
nothing may be left. Before that comes the core alone: many events of a world where everything goes wrong
(tests/core/chaos.py), and ten minutes of noise in which nothing does.
"""

from __future__ import annotations

import math
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.core.chaos import Chaos
from tests.core.detect.test_rank_detectors import test_ten_minutes_of_noise_end_no_rank as noise
from tests.flow.faults import Run, Up
from tests.flow.scripts import trained
from tests.flow.troubled import LEARNT, TROUBLED, Told, blames
from torchloom.core.detect.kinds_and_responses import HANGS
from torchloom.protocol.run_records import AttemptStopping
from torchloom.protocol.views import IncidentView

EVENTS_PER_SECOND = 4_000
NOISES_PER_MINUTE = 2
BOTH_SECONDS = 120.0
"""A campaign of this length plays both kinds of weather, on however busy a machine."""
BLOWS = 6
"""In one training."""
PATIENCE = 120.0
"""Seconds after a blow in which its verdict must be known, and then training go on. Machines may be busy."""
BURNING_SECONDS = 20.0
GLANCE = 0.3
A_MOMENT = 1.0
"""Seconds after which a stopped rank is one that is frozen."""


@dataclass(frozen=True)
class Blow:
    kind: str
    rank: int
    seconds: float = 0.0
    """How long it lasts, where it ends by itself."""


@dataclass(frozen=True)
class Weather:
    """What may happen to a training, and under which policy."""

    words: tuple[str, ...]
    kinds: tuple[str, ...]


QUICK = Weather(
    ("--on", "hang=restart@3", "--on", "not_finite=rollback"),
    ("freeze", "hold", "sleep", "die", "nan", "stop_for_a_moment", "evaluate"),
)
PATIENT = Weather((), ("slow", "grow", "pause", "collect", "burn", "evaluate", "stop_for_a_moment", "freeze", "die"))


# ── troubles ─────────────────────────────────────────────────────────────────────────────────────────────────────────


class Storm:
    """One training and what became of it."""

    def __init__(self, run: Run, up: Up) -> None:
        self.run = run
        self.told = Told(run, up)
        self.problems: list[str] = []
        self.attempt = 1
        self.known: set[str] = set()
        """Incidents that were looked at."""

    @property
    def restarts(self) -> int:
        return self.attempt - 1

    def play(self, blows: list[Blow]) -> None:
        blow = None
        try:
            for blow in blows:
                self.told.until_learnt(self.attempt, LEARNT)
                began = time.monotonic()
                getattr(self, blow.kind)(blow)
                self._nothing_else(blow)
                print(f"    {blow.kind} of rank {blow.rank}: {time.monotonic() - began:.1f} s", flush=True)
            blow = None
            self._end()
        except AssertionError as error:
            self.problems.append(f"{blow or 'the end'}: {str(error)[-2500:]}")

    # What ends the attempt.

    def freeze(self, blow: Blow) -> None:
        os.kill(self.run.pid(blow.rank), signal.SIGSTOP)
        self._restarted_for("frozen", blow)

    def hold(self, blow: Blow) -> None:
        self.run.tell(blow.rank, "gil")
        self._restarted_for("held", blow)

    def sleep(self, blow: Blow) -> None:
        self.run.tell(blow.rank, "sleep")
        self._restarted_for("hang", blow)

    def die(self, blow: Blow) -> None:
        self.run.kill(blow.rank)
        incident = self._new(lambda i: i.kind == "crash" and i.closed is not None)
        if incident.about.rank is None or incident.about.rank.rank != blow.rank:
            self.problems.append(f"{blow}: {incident.about} is blamed")
        self.attempt += 1

    def nan(self, blow: Blow) -> None:
        self.run.tell(blow.rank, "nan")
        self._new(lambda i: i.kind == "not_finite" and i.closed is not None)
        self.attempt += 1
        self.known |= {i.id for i in self.told.incidents("gradient", "loss_spike")}  # of the same numbers

    def _restarted_for(self, kind: str, blow: Blow) -> None:
        incident = self._new(lambda i: i.kind in HANGS and i.closed is not None)
        if not blames(incident, kind, blow.rank):
            self.problems.append(f"{blow}: {incident.about}: {incident.evidence}")
        if not self.told.shows_stacks(incident):
            self.problems.append(f"{blow}: no stacks of both ranks in {incident.evidence}")
        if "started_again_from_step" not in self.told.outcome(incident):
            self.problems.append(f"{blow}: {incident.outcome}")
        self.attempt += 1

    # What is told and ends nobody.

    def slow(self, blow: Blow) -> None:
        self.run.tell(blow.rank, "slow")
        incident = self._new(lambda i: i.kind == "straggler")
        if not blames(incident, "straggler", blow.rank):
            self.problems.append(f"{blow}: {incident.about} is blamed")
        self.run.tell(blow.rank, "well")
        self.told.until(lambda i: i.id == incident.id and i.closed is not None, PATIENCE)

    def grow(self, blow: Blow) -> None:
        self.run.tell(blow.rank, f"ramp {blow.seconds:.0f}")
        self._trains_for(blow.seconds)
        for incident in self.told.incidents("memory"):  # whether it is told depends on how large the machine is
            self.known.add(incident.id)
            if not blames(incident, "memory", blow.rank):
                self.problems.append(f"{blow}: {incident.about} is blamed")

    # What only looks like trouble.

    def evaluate(self, blow: Blow) -> None:
        self._does(blow, "eval")

    def pause(self, blow: Blow) -> None:
        self._does(blow, "quiet")

    def collect(self, blow: Blow) -> None:
        self._does(blow, "gc")

    def _does(self, blow: Blow, what: str) -> None:
        before = self.run.step()
        self.run.tell(blow.rank, f"{what} {blow.seconds:.1f}")
        self.run.until(lambda: self.run.step() > before + LEARNT, PATIENCE)
        for incident in self.told.incidents(*HANGS):  # it may be told of, and must be over
            if incident.id not in self.known:
                self.known.add(incident.id)
                over = self.told.until(lambda i, id=incident.id: i.id == id and i.closed is not None, PATIENCE)  # type: ignore[misc]
                if not self.told.went_on_by_itself(over):
                    self.problems.append(f"{blow}: {over.outcome}")

    def stop_for_a_moment(self, blow: Blow) -> None:
        began = time.monotonic()
        with self.run.frozen(self.run.pid(blow.rank)):
            time.sleep(GLANCE)
        took = time.monotonic() - began
        self._trains_for(3.0)
        if took > A_MOMENT:  # this process did not get on: it was rightly ended
            print(f"    the moment took {took:.1f} s", flush=True)
            self.known |= {i.id for i in self.told.incidents("frozen")}
            self.attempt = max(self.told.up.attempts(self.run.job))

    def burn(self, _: Blow) -> None:
        """Every core has more to do than it can."""
        burners = [subprocess.Popen([sys.executable, "-S", "-c", "while True: pass"]) for _ in range(2 * _cores())]
        try:
            self._trains_for(BURNING_SECONDS)
        finally:
            for burner in burners:
                burner.kill()
                burner.wait()

    def _trains_for(self, seconds: float) -> None:
        end, before = time.monotonic() + seconds, self.run.step()
        self.run.until(lambda: time.monotonic() > end and self.run.step() > before, PATIENCE)

    # ── looking ──

    def _new(self, wanted: Callable[[IncidentView], bool]) -> IncidentView:
        found = self.told.until(lambda i: i.id not in self.known and wanted(i), PATIENCE)
        self.known.add(found.id)
        return found

    def _nothing_else(self, blow: Blow) -> None:
        """No incident beside the one that was awaited, but for what follows from a busy machine; and one attempt."""
        mild = {"slowdown", "plateau"} | ({"overdue", "straggler"} if blow.kind in {"slow", "burn", "grow"} else set())
        for incident in self.told.incidents():
            if incident.id not in self.known and incident.kind not in mild and not self._goes_on(incident):
                self.problems.append(f"{blow}: also {incident.id} {incident.what}: {incident.evidence}")
            self.known.add(incident.id)
        begun = self.told.up.attempts(self.run.job)
        if begun != list(range(1, self.attempt + 1)):
            self.problems.append(f"{blow}: attempts began as {begun}")
            self.attempt = max(begun)

    def _goes_on(self, incident: IncidentView) -> bool:
        """By itself; that may be still to come."""
        if incident.kind not in HANGS:
            return False
        over = self.told.until(lambda i: i.id == incident.id and i.closed is not None, PATIENCE)
        return self.told.went_on_by_itself(over)

    def _end(self) -> None:
        self.told.until_learnt(self.attempt, further=11)
        code, last = self.run.end_now()
        assert code == 0, f"exit code {code}:\n{self.run.text()}"
        if self.run.ends() != [trained(last)] * self.run.ranks:
            self.problems.append(f"other parameters than without the troubles after {last} steps: {self.run.ends()}")
        stops = Counter(r.attempt for r in self.told.records() if isinstance(r, AttemptStopping))
        self.problems += [f"attempt {attempt} was ended {n} times" for attempt, n in stops.items() if n > 1]
        self.problems += [f"{s} was started {n} times" for s, n in Counter(self.run.starts()).items() if n > 1]
        self.problems += [f"left: {what}" for what in self.run.left()]


def storm(folder: Path, up: Up, weather: Weather, blows: list[Blow]) -> Storm:
    words = ("--grace", "1", "--max-restarts", "1000", *weather.words)
    run = Run(folder, *words, up=up, script=TROUBLED, steps=1_000_000, standby=1)
    found = Storm(run, up)
    try:
        found.play(blows)
    finally:
        run.clear()
    return found


def plan(seed: int, weather: Weather, blows: int = BLOWS) -> list[Blow]:
    """So many different troubles, as long as there are so many."""
    chance = random.Random(seed)
    kinds: list[str] = []
    while len(kinds) < blows:
        kinds += chance.sample(weather.kinds, len(weather.kinds))
    lasts = {"grow": (10, 25), "pause": (3, 10), "evaluate": (3, 10), "collect": (1, 4)}
    drawn = []
    for kind in kinds[:blows]:
        drawn.append(Blow(kind, chance.randrange(2), chance.uniform(*lasts.get(kind, (0, 0)))))
    return drawn


# ── the core alone ───────────────────────────────────────────────────────────────────────────────────────────────────


def simulate(seed: int, events: int) -> list[str]:
    began = time.monotonic()
    world = Chaos(seed)
    problems = world.play(events)
    seconds = time.monotonic() - began
    responses = sum(count for kind, count in world.seen.items() if kind.startswith("response to "))
    print(
        f"  {world.count:,} events simulated at {world.count / seconds:,.0f} a second: "
        f"{world.seen['IncidentOpened']:,} incidents, {responses:,} responses",
        flush=True,
    )
    return [f"simulation of seed {seed}: {problem}" for problem in problems]


def be_noisy(seed: int, times: int) -> list[str]:
    problems = []
    for number in range(seed, seed + times):
        try:
            noise(number)
        except AssertionError as error:
            problems.append(f"ten minutes of noise, seed {number}: {str(error)[-500:]}")
    print(f"  {times} times ten minutes of noise: {len(problems)} false alarms", flush=True)
    return problems


def run(seed: int, seconds: float) -> list[str]:
    """What was wrong; empty if all held."""
    end = time.monotonic() + seconds
    problems = simulate(seed, round(EVENTS_PER_SECOND * seconds))
    problems += be_noisy(seed, math.ceil(NOISES_PER_MINUTE * seconds / 60))
    chance = random.Random(seed)
    number, storms = seed, 0
    least = 1 if seconds < BOTH_SECONDS else 2
    with tempfile.TemporaryDirectory(prefix="torchloom-campaign-") as folder:
        up = Up(Path(folder, "plane"))
        try:
            while not problems and (storms < least or time.monotonic() < end):
                weather = (QUICK, PATIENT)[storms % 2]
                here = Path(folder, str(storms))
                here.mkdir()
                found = storm(here, up, weather, plan(number, weather))
                print(f"  seed {number}: {found.restarts} restarts", flush=True)
                problems += [f"seed {number}: {problem}" for problem in found.problems]
                storms += 1
                number = chance.randrange(2**32)
        finally:
            up.stop()
    return problems


def _cores() -> int:
    return psutil.cpu_count() or 1
