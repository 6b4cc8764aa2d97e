"""The events that wait for a decision, and the durable inbox from which reports and facts join them.

The inbox is a stream: reports of ranks and facts of agents are read from it in order, each once. A subscription to its
subjects serves as a bell: it rings when a message is sent. The message can be read a little later, when it is on disk.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import msgspec
from nats.aio.client import Client
from nats.aio.msg import Msg

from torchloom.bus.streams import read_log
from torchloom.bus.tasks import set_within
from torchloom.core.events import Event, FactReceived, ReportReceived
from torchloom.errors import TorchLoomError
from torchloom.protocol.codec import decode_fact, decode_report
from torchloom.protocol.phrase import phrase
from torchloom.protocol.subjects import INBOX_STREAM, parse_rank
from torchloom.weaver.health import Health, log

BATCH = 1000
"""Most events that are decided together."""
CAPACITY = 50_000
"""Most events that wait. When it is full, the inbox stays on disk, and a roll-call makes up for lost advisories."""
PAUSES = (0.001, 0.002, 0.004, 0.008, 0.016, 0.032)
"""Seconds between attempts to read after a ring, until there is a message."""
LOOK_SECONDS = 1.0
"""Seconds between two attempts if the bell does not ring."""
PATIENCE = 30.0
"""Seconds after which a reading is restarted."""


class EventQueue(asyncio.Queue[tuple[Event, int]]):
    """Events in the order of their arrival, each with its sequence in the inbox; 0 if it came another way."""

    def __init__(self, health: Health) -> None:
        super().__init__(CAPACITY)
        self._health = health

    def offer(self, event: Event) -> bool:
        """Add an event that arrived, unless the queue is full; whether it was added."""
        if self.full():
            self._health.refuse(phrase("queue_full"))
            return False
        self.put_nowait((event, 0))
        return True

    async def take_batch(self) -> list[tuple[Event, int]]:
        """The next event, and those behind it, up to a batch."""
        batch = [await self.get()]
        while len(batch) < BATCH and not self.empty():
            batch.append(self.get_nowait())
        return batch


@dataclass(eq=False)
class Inbox:
    client: Client
    health: Health
    queue: EventQueue
    bell: asyncio.Event = field(default_factory=asyncio.Event)

    async def on_message(self, _message: Msg) -> None:
        self.bell.set()

    async def read_on(self, seq: int) -> None:
        """Read messages after `seq`, which is as far as the log has decided on them."""
        rung, tries = False, 0
        while True:
            received = False
            try:
                async with asyncio.timeout(PATIENCE):
                    async for stored in read_log(self.client, INBOX_STREAM.name, seq + 1):
                        event = self._decode(stored.subject, stored.data)
                        if event is not None:
                            await self.queue.put((event, stored.seq))
                        seq, received = stored.seq, True
            except TimeoutError:
                log.warning("reading the inbox took more than %g s; it restarts after message %d", PATIENCE, seq)
                continue
            except TorchLoomError as error:
                self.health.complain("inbox", phrase("inbox_unreadable", why=error.message))
                await asyncio.sleep(0.5)
                continue
            self.health.is_mended("inbox")
            if received:
                rung, tries = False, 0
            elif rung and tries < len(PAUSES):
                await asyncio.sleep(PAUSES[tries])
                tries += 1
            else:
                rung, tries = await set_within(self.bell, LOOK_SECONDS), 0
                self.bell.clear()

    def _decode(self, subject: str, data: bytes) -> Event | None:
        try:
            if subject.startswith("loom.fact."):
                return FactReceived(decode_fact(data))
            rank = parse_rank(subject)
            if rank is not None:
                return ReportReceived(rank, decode_report(data))
            self.health.refuse(phrase("subject_of_no_rank", what="report"))
        except Exception as error:  # noqa: BLE001  the next weaver must not fail at it again
            why = str(error) if isinstance(error, msgspec.MsgspecError) else repr(error)
            self.health.refuse(phrase("not_accepted", what=subject.split(".")[1], why=why))
        return None
