"""Looking at the ranks of this node: a glance several times a second, and a thorough look when one is asked for."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable

from msgspec.structs import replace

from torchloom.agent.attempt import Attempt
from torchloom.agent.monitor.exit_evidence import last_lines
from torchloom.agent.monitor.pressure import host_line
from torchloom.agent.monitor.rank_probe import LOOK_SECONDS
from torchloom.agent.monitor.stacks import SPIES, take
from torchloom.protocol.facts import Inspected
from torchloom.protocol.node import Inspect

LINES = 5
"""Of what a rank wrote to stderr last."""
MAX_SAID = 1000
Attempts = Callable[[], Iterable[Attempt]]


async def watch(attempts: Attempts, alarm: Callable[[], None]) -> None:
    """Until cancelled. `alarm` is called while something looks wrong."""
    before = time.monotonic()
    while True:
        await asyncio.sleep(LOOK_SECONDS)
        now = time.monotonic()
        for attempt in attempts():
            for sight in attempt.sights.values():
                sight.look(now - before)
                if sight.alarming:
                    alarm()
        before = now


async def inspect(attempt: Attempt, order: Inspect, node: str) -> Inspected:
    """Where every rank of the attempt that runs here is."""
    spies = asyncio.Semaphore(SPIES)
    alive = [rank for rank, status in sorted(attempt.ranks.items()) if status.state == "running"]
    found = await asyncio.gather(*(take(rank, attempt.sights[rank], spies) for rank in alive if rank in attempt.sights))
    ranks = tuple(replace(stacks, said=_said(attempt, stacks.rank)) for stacks in found)
    return Inspected(job=order.job, node=node, incident=order.incident, ranks=ranks, host=host_line())


def _said(attempt: Attempt, rank: int) -> str:
    return "\n".join(last_lines(attempt.log(rank, "err"), LINES))[-MAX_SAID:]
