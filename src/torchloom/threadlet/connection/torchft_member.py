"""A session's part for a rank of a torchft replica: report which replica that is, and listen to its lighthouse."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable

from msgspec.structs import replace
from nats.aio.client import Client
from nats.aio.msg import Msg

from torchloom.protocol.codec import decode_lighthouse_beat
from torchloom.protocol.rank import Report
from torchloom.protocol.subjects import QUORUM
from torchloom.threadlet.connection.rank_state import RankState

logger = logging.getLogger("torchloom")


class TorchftMember:
    def __init__(self, client: Client, state: RankState, report: Callable[[Report, str], Awaitable[bool]]) -> None:
        self._client = client
        self._state = state
        self._report = report
        self._listens = False
        self.hello = 0
        """The number of the last hello that the server has stored."""
        self._reported_after = 0
        """The number of the hello after which the replica was reported."""

    async def listen(self) -> None:
        """Subscribe to the lighthouse of the job, once the rank is known to be part of a torchft replica."""
        if self._state.member is not None and not self._listens:
            self._listens = True
            await self._client.subscribe(QUORUM.to(job=self._state.rank.job), cb=self._hear)

    async def _hear(self, message: Msg) -> None:
        member = self._state.member
        if member is not None:
            try:
                member.hear(decode_lighthouse_beat(message.data))
            except Exception as error:  # noqa: BLE001  the next one comes within a second
                logger.debug("torchLoom: a lighthouse was not understood: %r", error)

    async def report(self) -> bool:
        """Report the replica after each hello, since the weaver may not know this incarnation. True if it is stored."""
        hello, state, member = self.hello, self._state, self._state.member
        if member is None or member.joined is None or self._reported_after == hello:
            return True
        joined = replace(member.joined, incarnation=state.incarnation)
        if await self._report(joined, f"joined-{state.hellos}-{hello}"):
            self._reported_after = hello
            return True
        return False
