"""Reads and answers one HTTP request per connection. h11 implements the protocol; this module adds the limits.

A slow client is disconnected, and one that sends too much gets an error. The rest of what a client still sends after
the answer is read for a moment: if the connection were closed at once, it would lose the answer.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import h11

BODY_BYTES = 1024 * 1024
SLOW_SECONDS = 10.0
"""Time for a request to arrive, and for its answer to be read."""
LINGER_SECONDS = 1.0
_CHUNK = 64 * 1024


@dataclass(eq=False)
class Answer(Exception):
    """The answer to a request. Raised, it needs no regard to the body."""

    status: int
    text: str
    headers: tuple[tuple[str, str], ...] = ()


Admit = Callable[[h11.Request], None]
"""Checks the head of a request, and raises an Answer if the rest need not be read."""
Respond = Callable[[bytes], Awaitable[Answer]]


async def converse(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    admit: Admit,
    respond: Respond,
    slow_seconds: float = SLOW_SECONDS,
) -> None:
    line = h11.Connection(h11.SERVER)
    try:
        async with asyncio.timeout(slow_seconds):
            body = await _body(line, reader, writer, admit)
    except Answer as early:
        answer = early
    except TimeoutError:
        answer = Answer(408, f"the request did not arrive within {slow_seconds:g} s")
    except h11.RemoteProtocolError as error:
        answer = Answer(error.error_status_hint, f"this is not HTTP: {error}")
    else:
        answer = await respond(body)
    async with asyncio.timeout(slow_seconds):
        await _send(line, writer, answer)
    if line.their_state is not h11.DONE:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LINGER_SECONDS):
                while await reader.read(_CHUNK):
                    pass


async def _body(
    line: h11.Connection, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, admit: Admit
) -> bytes:
    """The body of a request whose head is admitted."""
    body, size = bytearray(), 0
    while True:
        event = line.next_event()
        if event is h11.NEED_DATA:
            if line.they_are_waiting_for_100_continue:
                writer.write(line.send(h11.InformationalResponse(status_code=100, headers=[])) or b"")
            line.receive_data(await reader.read(_CHUNK))
        elif isinstance(event, h11.Request):
            admit(event)
            size = int(dict(event.headers).get(b"content-length", b"0"))
        elif isinstance(event, h11.Data):
            body += event.data
            size = max(size, len(body))
        elif isinstance(event, h11.EndOfMessage):
            return bytes(body)
        else:
            raise ConnectionResetError("the client went away")
        if size > BODY_BYTES:
            raise Answer(413, f"more than {BODY_BYTES:,} bytes; set max_alerts in Alertmanager's webhook")


async def _send(line: h11.Connection, writer: asyncio.StreamWriter, answer: Answer) -> None:
    if line.our_state not in {h11.IDLE, h11.SEND_RESPONSE}:
        return  # what came was no HTTP at all
    body = f"{answer.text}\n".encode()
    headers = [
        ("Content-Type", "text/plain; charset=utf-8"),
        ("Content-Length", str(len(body))),
        ("Connection", "close"),
        *answer.headers,
    ]
    response = h11.Response(status_code=answer.status, headers=headers)
    for event in (response, h11.Data(data=body), h11.EndOfMessage()):
        writer.write(line.send(event) or b"")
    await writer.drain()
    if writer.can_write_eof():
        writer.write_eof()
