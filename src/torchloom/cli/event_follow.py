"""Following the log: a doorbell says that something was appended, and the stream says what.

A message on `loom.log` reaches us whether or not the stream took it, and without its sequence; so it only rings. What
is shown is read from the stream, from the sequence after the last one shown: nothing twice, nothing missed, nothing
that the server refused.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress

from nats.aio.client import Client
from nats.aio.msg import Msg

from torchloom.bus.connection import connect, find
from torchloom.bus.streams import extent, read_log
from torchloom.errors import Unreachable
from torchloom.protocol.subjects import LOG, LOG_STREAM, Role
from torchloom.settings import Settings

Past = Callable[[Client], Awaitable[int]]
_LOOK_ANYWAY = 5.0
"""Seconds after which the stream is looked at without a ring: one may have been lost with a connection."""
_NOT_YET = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5)
"""Pauses in which a message that rang is given time to be stored."""


class _Bell:
    """Counts rings; a ring without a count only says: look."""

    def __init__(self) -> None:
        self.rings = 0
        self._event = asyncio.Event()

    async def ring(self, _: Msg) -> None:
        self.rings += 1
        self._event.set()

    def nudge(self) -> None:
        self._event.set()

    async def wait(self) -> None:
        with suppress(TimeoutError):
            await asyncio.wait_for(self._event.wait(), _LOOK_ANYWAY)
        self._event.clear()


async def follow(
    settings: Settings,
    past: Past,
    show: Callable[[int, bytes], None],
    say: Callable[[str], None],
) -> None:
    """`past` shows the history and returns its last sequence; `show` gets every entry after it. Ends by Ctrl-C."""
    bell = _Bell()
    closed = asyncio.Event()
    down = False

    async def lost() -> None:
        nonlocal down
        if not down and not closed.is_set():  # told again at every failed attempt to return, and when we close
            say("loom: the server is gone; waiting for it to come back")
        down = True

    async def back() -> None:
        nonlocal down
        down = False
        say("loom: the server is back")
        bell.nudge()

    async def end() -> None:
        closed.set()
        bell.nudge()

    client = await connect(
        find(settings, Role.VIEWER), name="loom events", keep_trying=True, on_lost=lost, on_back=back, on_closed=end
    )
    try:
        await client.subscribe(LOG.to(), cb=bell.ring)  # before reading the past, or something falls between
        await client.flush()
        position = await _past(client, past, bell, say)
        while not closed.is_set():
            heed()
            await bell.wait()
            if client.is_connected:
                position = await _catch_up(client, position, bell, show)
        raise Unreachable("the server closed the connection permanently", hint="is the credential still valid?")
    finally:
        closed.set()
        await client.close()


async def _past(client: Client, past: Past, bell: _Bell, say: Callable[[str], None]) -> int:
    reported = False
    while True:
        heed()
        try:
            return await past(client)
        except Unreachable as error:
            if client.is_closed:
                raise
            if not reported:
                say(f"loom: {error.message}; waiting")
            reported = True
            await bell.wait()


def heed() -> None:
    """End if Ctrl-C was pressed: a cancellation that arrives with a message is lost in Python 3.11's `wait_for`."""
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError


async def _catch_up(client: Client, position: int, bell: _Bell, show: Callable[[int, bytes], None]) -> int:
    """Show what came after `position`. Looks again while fewer came than rang, for a moment."""
    rings, bell.rings = bell.rings, 0
    seen = 0
    for pause in (*_NOT_YET, 0.0):
        try:
            async for stored in read_log(client, LOG_STREAM.name, position + 1):
                show(stored.seq, stored.data)
                position = stored.seq
                seen += 1
            if seen == 0 and rings == 0 and (await extent(client, LOG_STREAM.name)).last < position:
                return 0  # the log was recreated: another state folder, or it was wiped
        except Unreachable:
            return position  # the next ring, or the return of the server, brings us back
        if seen >= rings + bell.rings:
            break
        await asyncio.sleep(pause)
    bell.rings = 0
    return position
