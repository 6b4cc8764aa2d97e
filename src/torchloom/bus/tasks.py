"""Background tasks: kept until they end, and ended reliably; and what a service waits for: events and signals.

In Python 3.11 asyncio.wait_for can lose a cancellation, so `end_all` repeats it, and `set_within` does without it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
from collections.abc import Callable, Collection, Coroutine
from typing import Any

AGAIN_SECONDS = 0.05
ATTEMPTS = 100


class TaskSet(set[asyncio.Task[Any]]):
    """Tasks in progress. asyncio itself refers to a task only weakly: one that nobody keeps may vanish."""

    def start(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = asyncio.create_task(work)
        self.keep(task)
        return task

    def keep(self, task: asyncio.Task[Any]) -> None:
        """Keep a task until it has ended."""
        self.add(task)
        task.add_done_callback(self.discard)

    async def end(self) -> None:
        await end_all(list(self))


def on_stop_signal(call: Callable[[], object]) -> None:
    """Call this at SIGTERM and at Ctrl-C, each time, instead of ending the process."""
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, call)


async def set_within(event: asyncio.Event, seconds: float) -> bool:
    """Wait until an event is set, at most this long; whether it is."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await event.wait()
    return event.is_set()


async def end_all(tasks: Collection[asyncio.Future[Any]]) -> None:
    """Cancel the tasks until they have ended, and ignore their results."""
    pending = set(tasks)
    for _ in range(ATTEMPTS):
        for task in pending:
            task.cancel()
        if pending:
            _, pending = await asyncio.wait(pending, timeout=AGAIN_SECONDS)
        if not pending:
            break
    else:
        logging.getLogger("torchloom").critical("torchLoom: a task does not end: %r", pending)
    for task in tasks:
        if task.done() and not task.cancelled():
            task.exception()  # otherwise asyncio logs that it was never retrieved
