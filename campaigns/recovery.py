"""Recovery under fire: one training of two gloo ranks under `loom run` is hit by fault after fault.

A plan is drawn from the seed: what is hit, and when. In the end the parameters must be those of a training that nothing
happened to, to the bit; no attempt may have begun twice, no rank been started twice in one; and nothing may be left.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.flow.faults import Run, Up
from tests.flow.scripts import GLOO, trained

FAULTS = 20
PATIENCE = 180.0
"""Seconds after a fault in which training must go on, or end."""


@dataclass(frozen=True)
class Blow:
    kind: str
    rank: int
    """The one that is hit first."""
    after: float
    """Seconds of training before it."""
    apart: float
    """Seconds between its two parts."""


# ── faults ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def kill_one(run: Run, blow: Blow) -> None:
    run.kill(blow.rank)


def kill_both(run: Run, blow: Blow) -> None:
    run.kill(blow.rank, 1 - blow.rank)


def stop_one_and_kill_the_other(run: Run, blow: Blow) -> None:
    os.kill(run.pid(blow.rank), signal.SIGSTOP)
    time.sleep(blow.apart)
    run.kill(1 - blow.rank)


def let_one_exit(run: Run, blow: Blow) -> None:
    run.tell(blow.rank, "exit")


def let_one_raise(run: Run, blow: Blow) -> None:
    run.tell(blow.rank, "raise")


def kill_weaver(run: Run, _: Blow) -> None:
    _kill_plane(run, "weaver")


def kill_nats(run: Run, _: Blow) -> None:
    _kill_plane(run, "nats-server")


def kill_weaver_in_recovery(run: Run, blow: Blow) -> None:
    run.kill(blow.rank)
    time.sleep(blow.apart)
    _kill_plane(run, "weaver")


def kill_nats_in_recovery(run: Run, blow: Blow) -> None:
    run.kill(blow.rank)
    time.sleep(blow.apart)
    _kill_plane(run, "nats-server")


def kill_supervisors(run: Run, _: Blow) -> None:
    """The one that has the ranks, and the standby."""
    _kill(run.children("torchloom.agent.supervisor.main"))


def kill_standby_in_recovery(run: Run, blow: Blow) -> None:
    run.kill(blow.rank)
    time.sleep(blow.apart)
    _kill(run.children("--preload"))


def kill_in_recovery(run: Run, blow: Blow) -> None:
    """One rank, and then whoever is there a moment later: its peer, which is being ended, or the next attempt."""
    run.kill(blow.rank)
    time.sleep(blow.apart)
    for supervisor in run.children("torchloom.agent.supervisor.main"):
        with contextlib.suppress(psutil.Error):
            _kill(supervisor.children())


def damage_the_newest(run: Run, blow: Blow) -> None:
    """Two checkpoints that are not whole, of which none must be resumed from; and a reason to resume."""
    kept, stopped = run.folder / "kept", psutil.Process(run.pid(1 - blow.rank))

    def stopped_between_saves() -> bool:
        """A save that both ranks have begun would be completed at SIGCONT, and be newer than what is damaged here."""
        stopped.suspend()
        run.until(lambda: stopped.status() == psutil.STATUS_STOPPED)
        if not any(kept.glob(".saving-*")):
            return True
        stopped.resume()
        return False

    run.until(lambda: len(list(kept.glob("step-*"))) >= 2)
    run.until(stopped_between_saves)
    torn, cut = sorted(kept.glob("step-*"), key=lambda path: int(path.name[5:]))[-2:]
    (torn / "manifest.json").write_bytes(b"torn")
    largest = max(cut.glob("*.distcp"), key=lambda path: path.stat().st_size)
    os.truncate(largest, largest.stat().st_size // 2)
    run.kill(blow.rank)


def _kill_plane(run: Run, name: str) -> None:
    assert run.up
    child = run.up.child(name)
    if child is not None:  # or it is being started again
        _kill([child])


def _kill(processes: list[psutil.Process]) -> None:
    """Those that are still there."""
    for process in processes:
        with contextlib.suppress(psutil.Error):
            process.kill()


KINDS: dict[str, Callable[[Run, Blow], None]] = {
    fault.__name__: fault
    for fault in (
        kill_one, kill_both, stop_one_and_kill_the_other, let_one_exit, let_one_raise, kill_weaver, kill_nats,
        kill_weaver_in_recovery, kill_nats_in_recovery, kill_supervisors, kill_standby_in_recovery, kill_in_recovery,
        damage_the_newest,
    )
}  # fmt: skip


# ── a storm ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def plan(seed: int, faults: int = FAULTS) -> list[Blow]:
    chance = random.Random(seed)
    kinds = list(KINDS)
    return [
        Blow(chance.choice(kinds), chance.randrange(2), chance.uniform(0, 1.5), chance.uniform(0, 0.3))
        for _ in range(faults)
    ]


@dataclass
class Storm:
    """One training and what became of it."""

    run: Run
    problems: list[str]
    restarts: int = 0
    seconds: float = 0.0

    def play(self, blows: list[Blow]) -> None:
        began = time.monotonic()
        try:
            for blow in blows:
                self._until_it_trains()
                time.sleep(blow.after)
                with contextlib.suppress(ProcessLookupError):  # the blow before took its time, and hit it first
                    KINDS[blow.kind](self.run, blow)
            self._until_it_trains()
            self._end()
        except AssertionError as error:
            self.problems.append(str(error)[-2000:])
        self.seconds = time.monotonic() - began

    def _until_it_trains(self) -> None:
        """Both ranks of the newest attempt have gone on from where this look began, and saved."""
        before = time.monotonic()
        seen = [self.run.step(rank) for rank in range(self.run.ranks)]

        def goes_on() -> bool:
            lives = self.run.lives()
            newest = max((life["attempt"] for life in lives), default=0)
            ranks = {life["rank"]: life["first"] for life in lives if life["attempt"] == newest}
            steps = [self.run.step(rank) for rank in range(self.run.ranks)]
            past = all(steps[rank] >= first + 11 for rank, first in ranks.items())
            fresh = all(step != old for step, old in zip(steps, seen, strict=True))
            alive = all(psutil.pid_exists(life["pid"]) for life in lives if life["attempt"] == newest)
            return len(ranks) == self.run.ranks and past and fresh and alive and time.monotonic() > before + 0.2

        self.run.until(goes_on, PATIENCE)

    def _end(self) -> None:
        assert self.run.up
        code, last = self.run.end_now()
        assert code == 0, f"exit code {code}:\n{self.run.text()}"
        if self.run.ends() != [trained(last)] * self.run.ranks:
            self.problems.append(f"other parameters than without the faults after {last} steps: {self.run.ends()}")
        begun = self.run.up.attempts(self.run.job)
        if begun != list(range(1, len(begun) + 1)):
            self.problems.append(f"attempts began as {begun}")
        self.restarts = len(begun) - 1
        self.problems += [f"{s} was started {n} times" for s, n in Counter(self.run.starts()).items() if n > 1]
        self.problems += [f"left: {what}" for what in self.run.left()]


def storm(folder: Path, up: Up, blows: list[Blow], warm: bool = False) -> Storm:
    """With `warm` the first blow waits until restarts are quick."""
    # Some faults stop a rank first; whether that alone ends it is not the question here.
    words = ("--grace", "1", "--max-restarts", "1000", "--on", "frozen=report")
    run = Run(folder, *words, up=up, script=GLOO, steps=1_000_000, standby=1)
    found = Storm(run, [])
    try:
        if warm:
            run.until(run.standby_ready)
        found.play(blows)
    finally:
        run.clear()
    return found


def run(seed: int, seconds: float) -> list[str]:
    """What was wrong; empty if all held."""
    end = time.monotonic() + seconds
    problems: list[str] = []
    chance = random.Random(seed)
    number = seed
    with tempfile.TemporaryDirectory(prefix="torchloom-campaign-") as folder:
        up = Up(Path(folder, "plane"))
        try:
            while not problems and (number == seed or time.monotonic() < end):
                here = Path(folder, str(number))
                here.mkdir()
                blows = plan(number)
                found = storm(here, up, blows)
                hit = ", ".join(f"{kind} {count}" for kind, count in sorted(Counter(b.kind for b in blows).items()))
                print(f"  seed {number}: {found.restarts} restarts in {found.seconds:.0f} s; {hit}", flush=True)
                problems += [f"seed {number}: {problem}" for problem in found.problems]
                number = chance.randrange(2**32)
        finally:
            up.stop()
    return problems
