"""Watching a rank from outside, several times a second: its liveness page and its state in the kernel.

Only time in which the watcher itself was awake counts: a look adds at most twice the pause between two looks, so that
an agent that slept, or a machine that was suspended, never makes a rank look dead.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from msgspec.structs import replace

from torchloom.protocol.node import RankStatus
from torchloom.shared.liveness_page import COLLECTING, PAUSED, STEP, TICK, View, view
from torchloom.shared.process_id import read_stat

LOOK_SECONDS = 0.2
FIND_LOOKS = 5
"""Between two searches for the page of a rank that has none yet."""
STOPPED = "T"
"""As /proc spells a process that was stopped. One that is traced ("t") has somebody who looks after it."""
NOT_RUNNING = frozenset("tT")
HELD_SECONDS = 0.5
"""Shorter pauses of the rank's other threads are of no interest."""
IDLE_SHARE = 0.2
"""Of a processor: a process that uses less waits."""
GLANCE_SECONDS = 0.0002
"""A thread that gives the processor back sooner only looks: those that wait for the interpreter do so 200 times a
second, and on a busy machine wait for a processor each time."""


class ThreadCpuTimes(NamedTuple):
    """What a thread had of processors so far."""

    ran: float
    waited: float
    times: int


@dataclass
class RankProbe:
    """One rank, as long as it lives."""

    pid: int
    proc: Path = Path("/proc")
    page: View | None = None
    step: int = 0
    idle_seconds: float = 0.0
    frozen: float = 0.0
    held: float = 0.0
    computes: bool = False
    phase: str = ""
    _looks: int = 0
    _tick: int = 0
    _before: Mapping[str, ThreadCpuTimes] = field(default_factory=dict)
    """What its threads had had of processors when the others were first seen not to move."""

    def look(self, seconds: float) -> None:
        """Look again, `seconds` after the last time."""
        counts = min(seconds, 2 * LOOK_SECONDS)
        state, _ = process_state(self.pid, self.proc)
        if self.page is None and self._looks % FIND_LOOKS == 0:
            self.page = view(self.pid, self.proc)
        self._looks += 1
        self.frozen = self.frozen + counts if state == STOPPED else 0.0
        if self.page is not None and self.held > HELD_SECONDS and not self.page.current:
            self.page = view(self.pid, self.proc)  # another program runs in its place
            self.idle_seconds = self.held = 0.0
        if self.page is not None:
            self._read(self.page, counts, state in NOT_RUNNING)

    def _read(self, page: View, counts: float, stopped: bool) -> None:
        marks = page.marks
        step, tick = marks[STEP], marks[TICK]
        self.phase = page.phase
        self.idle_seconds = 0.0 if step != self.step or marks[PAUSED] else self.idle_seconds + counts
        self.step = step
        if tick != self._tick or stopped or self.phase == "leaving":
            self.held, self.computes = 0.0, False
        elif not self.held:
            self.held, self._before = counts, turns(self.pid, self.proc)
        else:
            wanted = processor_seconds(self._before, turns(self.pid, self.proc))
            would = wanted > IDLE_SHARE * self.held or waits_for_a_page(self.pid, self.proc)
            self.computes = bool(marks[COLLECTING]) or would
            self.held += counts
        self._tick = tick

    @property
    def alarming(self) -> bool:
        """Whether the weaver should get its status more often than usual."""
        return self.frozen > 0 or self.held > HELD_SECONDS

    def end(self) -> None:
        """The process is gone; its page has the last step."""
        if self.page is not None:
            self.step = self.page.marks[STEP]
            self.page = None  # not closed: someone may be looking at it

    def complete(self, status: RankStatus) -> RankStatus:
        """What is known of a rank, with what was seen of it."""
        if status.state == "ended":
            return replace(status, step=self.step)
        held = self.held if self.held > HELD_SECONDS else 0.0
        return replace(
            status,
            step=self.step,
            idle_seconds=round(self.idle_seconds, 2),
            frozen=round(self.frozen, 2),
            held=round(held, 2),
            computes=bool(held) and self.computes,
            phase=self.phase,
        )


def process_state(pid: int, proc: Path = Path("/proc")) -> tuple[str, float]:
    """The kernel's letter for what a process does, and the processor seconds it has used; empty if it is gone."""
    stat = read_stat(proc / str(pid))
    if not stat:
        return "", 0.0
    return stat[0], (int(stat[11]) + int(stat[12])) / 100.0  # clock ticks are 100 a second for every process


def turns(pid: int, proc: Path = Path("/proc")) -> dict[str, ThreadCpuTimes]:
    """Of each thread of a process; and under no name of all together, where the kernel does not tell the rest."""
    times_of = {"": ThreadCpuTimes(process_state(pid, proc)[1], 0.0, 0)}
    with contextlib.suppress(OSError, ValueError):
        for thread in (proc / str(pid) / "task").iterdir():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it ended just now
                ran, waited, times = map(int, (thread / "schedstat").read_text().split()[:3])
                times_of[thread.name] = ThreadCpuTimes(ran / 1e9, waited / 1e9, times)
    return times_of


def processor_seconds(before: Mapping[str, ThreadCpuTimes], now: Mapping[str, ThreadCpuTimes]) -> float:
    """What the threads of a process used of processors, and waited for one: a busy machine gives them little."""
    nothing = ThreadCpuTimes(0.0, 0.0, 0)
    wanted = 0.0
    for thread, had in now.items():
        ran, waited, times = (new - old for new, old in zip(had, before.get(thread, nothing), strict=True))
        if thread:
            wanted += ran + (waited if ran >= GLANCE_SECONDS * times else 0.0)
    return max(now[""].ran - before.get("", nothing).ran, wanted)


def waits_for_a_page(pid: int, proc: Path = Path("/proc")) -> bool:
    """Whether a thread of it waits for memory or a disk, not to be interrupted: the machine may be swapping."""
    with contextlib.suppress(OSError):
        return any(read_stat(thread)[:1] == ["D"] for thread in (proc / str(pid) / "task").iterdir())
    return False
