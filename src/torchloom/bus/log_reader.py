"""Reads a stream in batches from a sequence on, without a consumer: it leaves nothing on the server.

JetStream's batched direct get answers one request with many messages. Each contains its own sequence and that of the
message before it, and a last one without content says how far the batch went. A lost message shows as a break in this
chain, and is requested again.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, suppress
from datetime import datetime
from typing import NamedTuple

import msgspec
import nats.errors
from nats.aio.client import Client
from nats.aio.msg import Msg

from torchloom.errors import TorchLoomError, Unreachable

BATCH = 256
BATCH_BYTES = 8 * 1024 * 1024
"""Far below the 128 MB at which nats-py drops what a subscription was sent."""
PATIENCE = 5.0
"""Seconds without an answer before a batch is requested again."""
ATTEMPTS = 3
_PAUSE = 0.1


class Extent(NamedTuple):
    """The first and last sequence a stream holds; last < first when it is empty."""

    first: int
    last: int


class Stored(NamedTuple):
    """One message of a stream."""

    seq: int
    at: float
    data: bytes
    subject: str


class _Batch(NamedTuple):
    whole: bool
    """Whether every message arrived; if not, the rest has to be requested again."""
    pending: int


async def read_log(
    client: Client, stream: str, first: int, *, last: int | None = None, patience: float = PATIENCE
) -> AsyncIterator[Stored]:
    """Each message from `first` on, to `last` or the end; gaps are passed over."""
    following = max(1, first)
    failures = 0
    while last is None or following <= last:
        count = BATCH if last is None else min(BATCH, last - following + 1)
        batch = _Batch(whole=False, pending=0)
        began = following
        async with aclosing(_ask(client, stream, following, count, patience)) as answers:
            async for answer in answers:
                if isinstance(answer, _Batch):
                    batch = answer
                    break
                if last is not None and answer.seq > last:
                    return
                following = answer.seq + 1
                yield answer
        if batch.whole and batch.pending == 0:
            return
        failures = 0 if following > began else failures + 1
        if failures >= ATTEMPTS:
            raise Unreachable(
                f"stream {stream} could not be read from message {following} on: the server does not answer",
                hint="look at logs/nats.log in the state folder",
            )
        if not batch.whole:
            await asyncio.sleep(_PAUSE)


async def extent(client: Client, stream: str, *, patience: float = PATIENCE) -> Extent:
    """What a stream holds at this moment."""
    for attempt in range(ATTEMPTS):
        try:
            reply = await client.request(f"$JS.API.STREAM.INFO.{stream}", b"", timeout=patience)
        except (nats.errors.Error, OSError) as error:
            if client.is_closed or attempt == ATTEMPTS - 1:
                raise Unreachable(f"the server does not say what stream {stream} holds: {error}") from error
            await asyncio.sleep(_PAUSE)
            continue
        answer = msgspec.json.decode(reply.data)
        if answer.get("error", {}).get("code") == 404:
            raise no_stream(stream)
        if "error" in answer:
            raise TorchLoomError(f"stream {stream}: {answer['error'].get('description', 'unknown error')}")
        return Extent(answer["state"]["first_seq"], answer["state"]["last_seq"])
    raise AssertionError("the loop ends by return or raise")


def no_stream(stream: str) -> Unreachable:
    return Unreachable(f"there is no stream {stream} yet", hint="the weaver makes it when it starts: `loom up`")


async def _ask(
    client: Client, stream: str, first: int, count: int, patience: float
) -> AsyncGenerator[Stored | _Batch, None]:
    """The messages of one batch, then a _Batch; without a _Batch at the end it was cut short."""
    inbox = client.new_inbox()  # a new one each time, so that late messages of an abandoned batch are not mixed in
    before = 0
    try:
        subscription = await client.subscribe(inbox)
    except (nats.errors.Error, OSError) as error:
        raise Unreachable(f"the connection to the server was lost: {error}") from error
    try:
        ask = msgspec.json.encode({"seq": first, "batch": count, "max_bytes": BATCH_BYTES})
        await client.publish(f"$JS.API.DIRECT.GET.{stream}", ask, reply=inbox)
        while True:
            message = await subscription.next_msg(timeout=patience)
            headers = message.headers or {}
            status = headers.get("Status")
            if status is None:
                sequence = int(headers["Nats-Sequence"])
                if sequence < first or int(headers["Nats-Last-Sequence"]) != before:
                    return
                before = sequence
                yield Stored(sequence, _seconds(headers["Nats-Time-Stamp"]), message.data, headers["Nats-Subject"])
            elif status == "204":
                whole = int(headers["Nats-Last-Sequence"]) == before
                yield _Batch(whole, int(headers["Nats-Num-Pending"]))
                return
            elif status == "404":  # nothing at or after `first`
                yield _Batch(whole=True, pending=0)
                return
            else:
                await _explain(client, stream, status, message)
                return
    except nats.errors.TimeoutError:
        return
    except (nats.errors.Error, OSError) as error:
        if client.is_closed:
            raise Unreachable(f"the connection to the server was lost: {error}") from error
        return
    finally:
        with suppress(nats.errors.Error, OSError):
            await subscription.unsubscribe()


async def _explain(client: Client, stream: str, status: str, message: Msg) -> None:
    """Status 503: either there is no such stream (raises), or the server is still starting."""
    if status != "503":
        what = next((v for k, v in (message.headers or {}).items() if k.lower() == "description"), "")
        raise TorchLoomError(f"stream {stream} cannot be read: {status} {what}".rstrip())
    await extent(client, stream)


def _seconds(stamp: str) -> float:
    return datetime.fromisoformat(stamp).timestamp()
