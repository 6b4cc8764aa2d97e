"""Reads the log from its stream, and follows it: a doorbell says that something was appended, and the stream says what.

A message on `loom.log` reaches us whether or not the stream took it, and without its sequence; so it only rings. What
is shown is read from the stream, from the sequence after the last one shown: nothing twice, nothing missed, nothing
that the server refused.
"""

from __future__ import annotations

import asyncio
import sys
from collections import deque
from collections.abc import Iterable

import msgspec
from nats.aio.client import Client
from nats.aio.msg import Msg

from torchloom.bus.connection import connect, find
from torchloom.bus.streams import extent, read_log
from torchloom.bus.tasks import set_within
from torchloom.cli.verb_call import Call, print_error
from torchloom.errors import Refused, Unreachable
from torchloom.protocol.codec import decode_entry
from torchloom.protocol.subjects import LOG, LOG_STREAM, Role
from torchloom.shared.suggestions import did_you_mean
from torchloom.views.records import Event, Teller, as_object, lines

_WIDEN = 4
"""If too few entries had something to show, this many times more are read."""
_LOOK_ANYWAY = 5.0
"""Seconds after which the stream is looked at without a ring: one may have been lost with a connection."""
_NOT_YET = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5)
"""Pauses in which a message that rang is given time to be stored."""


class EventReader:
    def __init__(self, call: Call) -> None:
        self._call = call
        self._teller = Teller(call.args.job)
        self._rings = 0
        """Messages that arrived since the stream was looked at."""
        self._woken = asyncio.Event()
        """Set by a ring, and by what else is a reason to look."""
        self._down = self._closed = False

    async def show_past(self) -> None:
        client = await connect(find(self._call.settings, Role.VIEWER), name="loom events")
        try:
            await self._past(client)
        finally:
            await client.close()

    async def follow(self) -> None:
        """Show the past, and every entry after it. Ends by Ctrl-C."""
        client = await connect(
            find(self._call.settings, Role.VIEWER),
            name="loom events",
            keep_trying=True,
            on_lost=self._lost,
            on_back=self._back,
            on_closed=self._end,
        )
        try:
            await client.subscribe(LOG.to(), cb=self._ring)  # before reading the past, or something falls between
            await client.flush()
            position = await self._await_past(client)
            while not self._closed:
                heed()
                await self._wait()
                if client.is_connected:
                    position = await self._catch_up(client, position)
            raise Unreachable("the server closed the connection permanently", hint="is the credential still valid?")
        finally:
            self._closed = True
            await client.close()

    async def _ring(self, _: Msg) -> None:
        self._rings += 1
        self._woken.set()

    async def _lost(self) -> None:
        if not self._down and not self._closed:  # told again at every failed attempt to return, and when we close
            self._call.note("loom: the server is gone; waiting for it to come back")
        self._down = True

    async def _back(self) -> None:
        self._down = False
        self._call.note("loom: the server is back")
        self._woken.set()

    async def _end(self) -> None:
        self._closed = True
        self._woken.set()

    async def _wait(self) -> None:
        await set_within(self._woken, _LOOK_ANYWAY)
        self._woken.clear()

    async def _await_past(self, client: Client) -> int:
        reported = False
        while True:
            heed()
            try:
                return await self._past(client)
            except Unreachable as error:
                if client.is_closed:
                    raise
                if not reported:
                    self._call.note(f"loom: {error.message}; waiting")
                reported = True
                await self._wait()

    async def _past(self, client: Client) -> int:
        """Show the last N events worth telling; the last sequence of the log."""
        whole = await extent(client, LOG_STREAM.name)
        wanted = span = self._call.args.last
        events: deque[Event] = deque(maxlen=wanted)
        while wanted:
            first = max(whole.first, whole.last - span + 1)
            events.clear()
            async for stored in read_log(client, LOG_STREAM.name, first, last=whole.last):
                events.extend(self._events(stored.seq, stored.data))
            if len(events) == wanted or first <= whole.first:
                break
            span *= _WIDEN
        self._show(events)
        if wanted and not events and (job := self._call.args.job) is not None:
            nothing = Refused(f"the log has no event of job {job!r}", hint=did_you_mean(job, sorted(self._teller.jobs)))
            if not self._call.args.follow:
                raise nothing
            print_error(nothing)  # its first event may be yet to come
        return whole.last

    async def _catch_up(self, client: Client, position: int) -> int:
        """Show what came after `position`. Looks again while fewer came than rang, for a moment."""
        rings, self._rings = self._rings, 0
        seen = 0
        for pause in (*_NOT_YET, 0.0):
            try:
                async for stored in read_log(client, LOG_STREAM.name, position + 1):
                    self._show(self._events(stored.seq, stored.data))
                    position = stored.seq
                    seen += 1
                if seen == 0 and rings == 0 and (await extent(client, LOG_STREAM.name)).last < position:
                    return 0  # the log was recreated: another state folder, or it was wiped
            except Unreachable:
                return position  # the next ring, or the return of the server, brings us back
            if seen >= rings + self._rings:
                break
            await asyncio.sleep(pause)
        self._rings = 0
        return position

    def _events(self, seq: int, data: bytes) -> list[Event]:
        try:
            return list(self._teller.events(seq, decode_entry(data)))
        except msgspec.MsgspecError as error:
            self._call.note(f"loom: entry {seq} of the log cannot be read: {error}")
            return []

    def _show(self, events: Iterable[Event]) -> None:
        for event in events:
            if self._call.json:
                self._call.print_json(as_object(event))
            else:
                self._call.print(lines(event, self._call.screen))
        sys.stdout.flush()  # a reader at the end of a pipe wants it now


def heed() -> None:
    """End if Ctrl-C was pressed: a cancellation that arrives with a message is lost in Python 3.11's `wait_for`."""
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError
