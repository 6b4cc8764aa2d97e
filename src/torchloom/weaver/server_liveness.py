"""Whether the server still speaks to us: one that hangs keeps its link open and says nothing.

A ping is always under way, and the next is sent when it is answered. The answer comes after all that was sent before
it, so under load it is late; but then something else comes in, and who hears that is not deaf. No ping is given up:
the late answer to one that was would end nats-py's reading, on a link that looks well for seconds.
"""

from __future__ import annotations

import asyncio
import contextlib

import nats.errors
from nats.aio.client import Client

QUIET = 4
"""Looks in a row between which nothing came at all, after which the server is taken to hang. Looks, not seconds: they
are as far apart as our own loop is slow."""
FORGET_SECONDS = 60.0
"""Much longer than the client itself keeps a link that does not answer."""


class ServerLiveness:
    def __init__(self, client: Client) -> None:
        self._client = client
        self._ping: asyncio.Task[None] | None = None
        self._came = 0
        self._quiet = 0

    def hears(self) -> bool:
        """To be asked again and again, at each tick."""
        if not self._client.is_connected:
            self.begin_anew()
            return True  # that is known, and its end will be announced
        came: int = self._client.stats["in_msgs"]
        answered = self._ping is None or self._ping.done()
        self._quiet = 0 if answered or came != self._came else self._quiet + 1
        self._came = came
        if answered:
            self._ping = asyncio.create_task(self._answer())
        return self._quiet < QUIET

    def begin_anew(self) -> None:
        """On a new link nobody answers the ping of the old one."""
        self._ping, self._quiet = None, 0

    async def _answer(self) -> None:
        with contextlib.suppress(nats.errors.Error, OSError):  # the link broke
            await self._client.flush(timeout=int(FORGET_SECONDS))
