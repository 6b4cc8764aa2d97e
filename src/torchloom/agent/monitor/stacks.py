"""Where a rank is, line by line: asked of itself, forced out of it, or read from outside, whichever works first.

A rank whose interpreter is free shows its stacks itself, which is safe at any time. One that is stopped, or whose
interpreter is held, cannot: py-spy reads its memory, without stopping it. Where that is not allowed, a signal makes
an interpreter that is held write them all the same: the last way, because it wakes a system call that was not to be
woken. It is sent only to a process that is known to catch it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import sys
import time
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path

from msgspec.structs import replace

from torchloom.agent.attempt import Attempt
from torchloom.agent.monitor.exit_evidence import last_lines
from torchloom.agent.monitor.pressure import describe_host
from torchloom.agent.monitor.rank_probe import LOOK_SECONDS, NOT_RUNNING, RankProbe, process_state
from torchloom.protocol.facts import Inspected, RankStacks
from torchloom.protocol.node import Inspect
from torchloom.protocol.phrase import Phrase, Prose, phrase
from torchloom.shared.liveness_page import SHOWN, SIGNAL, WANTED, View

ITSELF_SECONDS = 0.25
SIGNAL_SECONDS = 0.3
SPY_SECONDS = 2.0
POLL_SECONDS = 0.01
TRIES = 2
SPIES = 4
"""At once: each reads another process's memory for a while."""
TEXT = 19_000
STATES = {
    "R": phrase("state_running"),
    "S": phrase("state_sleeping"),
    "D": phrase("state_waiting"),
    "T": phrase("state_stopped"),
    "t": phrase("state_traced"),
    "Z": phrase("state_zombie"),
    "": phrase("state_gone"),
}


async def take(rank: int, probe: RankProbe, spies: asyncio.Semaphore) -> RankStacks:
    """The stacks of one rank, however they can be had."""
    letter, _ = process_state(probe.pid, probe.proc)
    state = STATES.get(letter) or phrase("state_other", letter=letter)
    page = None if letter in NOT_RUNNING else probe.page
    if page is not None and (text := await written(page, _show)):
        return RankStacks(rank=rank, how="itself", text=text, state=state)
    for _ in range(TRIES):  # it fails where a thread ends while it looks
        spied = await _spied(rank, probe.pid, state, spies)
        if spied.how != "none" or process_state(probe.pid, probe.proc)[0] in ("", "Z"):
            break
    if spied.how == "none" and page is not None and (text := await written(page, force)):
        return RankStacks(rank=rank, how="signal", text=text, state=state)
    return spied


async def written(page: View, request: Callable[[View, int], Awaitable[bool]]) -> str:
    """What a rank writes when it is requested; empty if it writes nothing."""
    with contextlib.suppress(OSError), page.open_stacks() as stacks:
        stacks.truncate(0)
        if await request(page, stacks.fileno()):
            return stacks.read(4 * TEXT).decode(errors="replace").replace("\0", "")[:TEXT]
    return ""


async def _show(page: View, _stacks: int) -> bool:
    """By its link thread, if that gets the interpreter."""
    wanted = page.marks[WANTED] + 1
    page.marks[WANTED] = wanted
    for _ in range(int(ITSELF_SECONDS / POLL_SECONDS)):
        await asyncio.sleep(POLL_SECONDS)
        if page.marks[SHOWN] >= wanted:
            return True
    return False


async def force(page: View, stacks: int) -> bool:
    """By the interpreter's own signal handler, which needs no interpreter lock."""
    number = page.marks[SIGNAL]
    if not number or not catches(page.pid, number):
        return False
    os.kill(page.pid, number)
    before = -1
    for _ in range(int(SIGNAL_SECONDS / POLL_SECONDS)):
        await asyncio.sleep(POLL_SECONDS)
        size = os.fstat(stacks).st_size
        if size and size == before:  # it is written without a pause
            break
        before = size
    return True


def catches(pid: int, number: int, proc: Path = Path("/proc")) -> bool:
    """Whether a process has a handler for this signal; one that has none would be ended by it."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in (proc / str(pid) / "status").read_text().splitlines():
            if line.startswith("SigCgt:"):
                return bool(int(line.split()[1], 16) >> (number - 1) & 1)
    return False


async def _spied(rank: int, pid: int, state: Phrase, spies: asyncio.Semaphore) -> RankStacks:
    program = spy()
    if program is None:
        return _unread(rank, state, phrase("no_py_spy"))
    async with spies:
        try:  # not in a thread, which would keep the agent from ending while py-spy hangs
            process = await asyncio.create_subprocess_exec(
                program, "dump", "--nonblocking", "--pid", str(pid),
                stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
            )  # fmt: skip
        except OSError as error:
            return _unread(rank, state, f"py-spy: {error}")
        try:
            async with asyncio.timeout(SPY_SECONDS):
                out, trouble = await process.communicate()
        except TimeoutError:
            return _unread(rank, state, phrase("py_spy_slow"))
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
    text = out.decode(errors="replace")
    if process.returncode == 0 and "Thread" in text:
        return RankStacks(rank=rank, how="py-spy", text=text[:TEXT], state=state)
    lines = trouble.decode(errors="replace").strip().splitlines()
    return _unread(rank, state, lines[0][:200] if lines else phrase("py_spy_read_nothing"))


def _unread(rank: int, state: Phrase, why: Prose) -> RankStacks:
    return RankStacks(rank=rank, how="none", state=phrase("stacks_not_read", state=state, why=why))


def spy() -> str | None:
    """py-spy's program: beside this interpreter, or on the path."""
    beside = Path(sys.executable).with_name("py-spy")
    return str(beside) if beside.exists() else shutil.which("py-spy")


LINES = 5
"""Of what a rank wrote to stderr last."""
MAX_SAID = 1000


async def watch(attempts: Callable[[], Iterable[Attempt]], alarm: Callable[[], None]) -> None:
    """Until cancelled. `alarm` is called while something looks wrong."""
    before = time.monotonic()
    while True:
        await asyncio.sleep(LOOK_SECONDS)
        now = time.monotonic()
        for attempt in attempts():
            for probe in attempt.probes.values():
                probe.look(now - before)
                if probe.alarming:
                    alarm()
        before = now


async def inspect(attempt: Attempt, order: Inspect, node: str) -> Inspected:
    """Where every rank of the attempt that runs here is."""
    spies = asyncio.Semaphore(SPIES)
    alive = [rank for rank, status in sorted(attempt.ranks.items()) if status.state == "running"]
    taken = await asyncio.gather(*(take(rank, attempt.probes[rank], spies) for rank in alive if rank in attempt.probes))
    ranks = []
    for stacks in taken:
        last = "\n".join(last_lines(attempt.log(stacks.rank, "err"), LINES))
        ranks.append(replace(stacks, said=last[-MAX_SAID:]))
    return Inspected(job=order.job, node=node, incident=order.incident, ranks=tuple(ranks), host=describe_host())
