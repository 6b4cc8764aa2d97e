"""The durable inbox: reports of ranks and facts of agents, read from the stream in order, each once.

A subscription to the subjects of the stream serves as a bell: it rings when a message is sent. The message can be read
a little later, when it is on disk.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable

import msgspec
from nats.aio.client import Client
from nats.aio.msg import Msg

from torchloom.bus.log_reader import read_log
from torchloom.core.events import Event, FactReceived, ReportReceived
from torchloom.errors import TorchLoomError
from torchloom.protocol.codec import decode_fact, decode_report
from torchloom.protocol.ids import RankId, check_name
from torchloom.protocol.phrase import phrase
from torchloom.protocol.subjects import INBOX_STREAM
from torchloom.weaver.health import Health

log = logging.getLogger("torchloom.weaver")

PAUSES = (0.001, 0.002, 0.004, 0.008, 0.016, 0.032)
"""Seconds between attempts to read after a ring, until there is a message."""
LOOK_SECONDS = 1.0
"""Seconds between two attempts if the bell does not ring."""
PATIENCE = 30.0
"""Seconds after which a reading is restarted."""
CROWDED_SECONDS = 0.02
"""Seconds between two messages while the queue of the weaver is full."""


class Inbox:
    def __init__(self, client: Client, health: Health, put: Callable[[Event, int], bool]) -> None:
        self._client = client
        self._health = health
        self._put = put
        self._bell = asyncio.Event()

    def ring(self) -> None:
        self._bell.set()

    async def on_bell(self, _message: Msg) -> None:
        self.ring()

    async def read_on(self, seq: int) -> None:
        """Read messages after `seq`, which is as far as the log has decided on them."""
        rung, tries = False, 0
        while True:
            received = False
            try:
                async with asyncio.timeout(PATIENCE):
                    async for stored in read_log(self._client, INBOX_STREAM.name, seq + 1):
                        seq, received = stored.seq, True
                        event = self._decode(stored.subject, stored.data)
                        if event is not None and not self._put(event, seq):
                            await asyncio.sleep(CROWDED_SECONDS)
            except TimeoutError:
                log.warning("reading the inbox took more than %g s; it restarts after message %d", PATIENCE, seq)
                continue
            except TorchLoomError as error:
                self._health.complain("inbox", phrase("inbox_unreadable", why=error.message))
                await asyncio.sleep(0.5)
                continue
            self._health.is_mended("inbox")
            if received:
                rung, tries = False, 0
            elif rung and tries < len(PAUSES):
                await asyncio.sleep(PAUSES[tries])
                tries += 1
            else:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._bell.wait(), LOOK_SECONDS)
                rung, tries = self._bell.is_set(), 0
                self._bell.clear()

    def _decode(self, subject: str, data: bytes) -> Event | None:
        try:
            if subject.startswith("loom.fact."):
                return FactReceived(decode_fact(data))
            rank = parse_rank(subject)
            if rank is not None:
                return ReportReceived(rank, decode_report(data))
            self._health.refuse(phrase("subject_of_no_rank", what="report"))
        except msgspec.MsgspecError as error:
            self._health.refuse(phrase("not_accepted", what=subject.split(".")[1], why=str(error)))
        except Exception as error:  # noqa: BLE001  the next weaver must not fail at it again
            self._health.refuse(phrase("not_accepted", what=subject.split(".")[1], why=repr(error)))
        return None


def parse_rank(subject: str) -> RankId | None:
    """The rank that a subject names; None if it names none."""
    parts = subject.split(".")
    if len(parts) != 5 or not parts[4].isdigit() or len(parts[4]) > 7:
        return None
    try:
        return RankId(check_name("job", parts[2]), check_name("replica", parts[3]), int(parts[4]))
    except TorchLoomError:
        return None
