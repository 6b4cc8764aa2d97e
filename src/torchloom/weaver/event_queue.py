"""The events that wait for a decision, in the order of their arrival."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from torchloom.core.events import Event
from torchloom.protocol.phrase import phrase
from torchloom.weaver.health import Health

BATCH = 1000
"""Most events that are decided together."""
CAPACITY = 50_000
"""Most events that wait. When it is full, the inbox stays on disk, and a roll-call makes up for lost advisories."""


@dataclass(frozen=True, slots=True)
class Waiting:
    event: Event
    reply: str = ""
    """The subject on which an answer is awaited."""
    inbox_seq: int = 0
    """Set for an event from the durable inbox."""


class EventQueue:
    def __init__(self, health: Health) -> None:
        self._health = health
        self._queue: asyncio.Queue[Waiting] = asyncio.Queue()

    def put(self, event: Event) -> None:
        """Add an event of the weaver itself, which is never refused."""
        self._queue.put_nowait(Waiting(event))

    def put_from_inbox(self, event: Event, seq: int) -> bool:
        """Add an event from the inbox; whether there is room for more."""
        self._queue.put_nowait(Waiting(event, inbox_seq=seq))
        return self._queue.qsize() < CAPACITY

    def offer(self, waiting: Waiting) -> bool:
        """Add an event that arrived, unless the queue is full; whether it was added."""
        if self._queue.qsize() >= CAPACITY:
            self._health.refuse(phrase("queue_full"))
            return False
        self._queue.put_nowait(waiting)
        return True

    def empty(self) -> bool:
        return self._queue.empty()

    async def take_batch(self) -> list[Waiting]:
        """The next event, and those behind it, up to a batch."""
        batch = [await self._queue.get()]
        while len(batch) < BATCH and not self._queue.empty():
            batch.append(self._queue.get_nowait())
        return batch
