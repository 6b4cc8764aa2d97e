"""Background tasks: kept until they end, and ended reliably.

In Python 3.11 asyncio.wait_for can lose a cancellation, so `end_all` repeats it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Coroutine
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
