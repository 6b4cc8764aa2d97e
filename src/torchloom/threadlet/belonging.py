"""What a connection has to do for a rank of a torchft replica: say which replica that is, and hear its lighthouse."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable

from msgspec.structs import replace
from nats.aio.client import Client
from nats.aio.msg import Msg

from torchloom.messages import Report, decode_lighthouse_beat
from torchloom.subjects import QUORUM
from torchloom.threadlet.life import Life

logger = logging.getLogger("torchloom")


class Belonging:
    def __init__(self, client: Client, life: Life, report: Callable[[Report, str], Awaitable[bool]]) -> None:
        self._client = client
        self._life = life
        self._report = report
        self._listens = False
        self.hello = 0
        """The number of the last hello that is stored."""
        self._told = 0
        """The number of the hello after which the replica was told."""

    async def listen(self) -> None:
        """To the lighthouse of the job, from when the rank is known to be one of torchft's."""
        if self._life.member is not None and not self._listens:
            self._listens = True
            await self._client.subscribe(QUORUM.to(job=self._life.rank.job), cb=self._hear)

    async def _hear(self, message: Msg) -> None:
        member = self._life.member
        if member is not None:
            try:
                member.hear(decode_lighthouse_beat(message.data))
            except Exception as error:  # noqa: BLE001  the next one comes within a second
                logger.debug("torchLoom: a lighthouse was not understood: %r", error)

    async def tell(self) -> bool:
        """With each hello: a weaver that knows nothing of this life has to learn it. Whether nothing is left to say."""
        hello, life, member = self.hello, self._life, self._life.member
        if member is None or member.joined is None or self._told == hello:
            return True
        joined = replace(member.joined, incarnation=life.incarnation)
        if await self._report(joined, f"joined-{life.hellos}-{hello}"):
            self._told = hello
            return True
        return False
