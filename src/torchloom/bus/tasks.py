"""Ends tasks reliably: in Python 3.11 asyncio.wait_for can lose a cancellation, so it is repeated."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection
from typing import Any

AGAIN_SECONDS = 0.05
ATTEMPTS = 100


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
