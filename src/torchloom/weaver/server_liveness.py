"""Whether the server still answers: a server that hangs keeps its connections open and sends nothing.

A ping is always in progress; when it is answered, the next one is sent. The answer comes after everything that was
sent before it, so under load it is late; but then other messages arrive, and the server is alive. No ping is given up:
the late answer to an abandoned one would end nats-py's reading, on a connection that looks well for seconds.
"""

from __future__ import annotations

import asyncio
import contextlib

import nats.errors
from nats.aio.client import Client

QUIET = 4
"""Consecutive calls of `answers` without any message in between, after which the server counts as hanging. Calls, not
seconds: they are as far apart as our own loop is slow."""
PING_SECONDS = 60.0
"""Much longer than the client itself keeps a connection that does not answer."""


class ServerLiveness:
    def __init__(self, client: Client) -> None:
        self._client = client
        self._ping: asyncio.Task[None] | None = None
        self._messages = 0
        self._quiet = 0

    def answers(self) -> bool:
        """To be called at each tick."""
        if not self._client.is_connected:
            self.reset()
            return True  # that is known, and its end will be announced
        messages: int = self._client.stats["in_msgs"]
        answered = self._ping is None or self._ping.done()
        self._quiet = 0 if answered or messages != self._messages else self._quiet + 1
        self._messages = messages
        if answered:
            self._ping = asyncio.create_task(self._wait_for_answer())
        return self._quiet < QUIET

    def reset(self) -> None:
        """A new connection does not answer the ping of the old one."""
        self._ping, self._quiet = None, 0

    async def _wait_for_answer(self) -> None:
        with contextlib.suppress(nats.errors.Error, OSError):  # the connection broke
            await self._client.flush(timeout=int(PING_SECONDS))
