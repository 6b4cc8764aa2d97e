"""JetStream streams: reads one in batches, and stores a message only where it is expected.

Reading needs no consumer, so it leaves nothing on the server. JetStream's batched direct get answers one request with
many messages. Each contains its own sequence and that of the message before it, and a last one without content says how
far the batch went. A lost message shows as a break in this chain, and is requested again.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import NamedTuple

import msgspec
import nats.errors
import nats.js.errors
from nats.aio.client import Client

from torchloom.errors import TorchLoomError, Unreachable
from torchloom.protocol.subjects import ABORT, COMMIT, VERDICT_STREAM, Stream
from torchloom.shared.json_decoding import decoder

BATCH = 256
BATCH_BYTES = 8 * 1024 * 1024
"""Far below the 128 MB at which nats-py drops what a subscription was sent."""
PATIENCE = 5.0
"""Seconds without an answer before a batch is requested again."""
ATTEMPTS = 3
_PAUSE = 0.1
_WRONG_LAST_SEQUENCE = 10071
"""The server's error code for: another message is stored where this one was expected."""


class Extent(NamedTuple):
    """The first and last sequence a stream holds; last < first when it is empty."""

    first: int
    last: int


class Stored(NamedTuple):
    """One message of a stream."""

    seq: int
    data: bytes
    subject: str


async def read_log(
    client: Client, stream: str, first: int, *, last: int | None = None, patience: float = PATIENCE
) -> AsyncIterator[Stored]:
    """Each message from `first` on, to `last` or the end; gaps are passed over."""
    following = max(1, first)
    failures = 0
    while last is None or following <= last:
        count = BATCH if last is None else min(BATCH, last - following + 1)
        messages, pending = await _read_batch(client, stream, following, count, patience)
        for message in messages:
            if last is not None and message.seq > last:
                return
            following = message.seq + 1
            await asyncio.sleep(0)  # what the caller does with each may take long: others have their turn in between
            yield message
        if pending == 0:
            return
        failures = 0 if messages else failures + 1
        if failures >= ATTEMPTS:
            raise Unreachable(
                f"stream {stream} could not be read from message {following} on: the server does not answer",
                hint="look at logs/nats.log in the state folder",
            )
        if pending is None:
            await asyncio.sleep(_PAUSE)


async def _read_batch(
    client: Client, stream: str, first: int, count: int, patience: float
) -> tuple[list[Stored], int | None]:
    """The messages of one batch, and how many follow it; None if it broke off, and must be requested from there on."""
    inbox = client.new_inbox()  # a new one each time, so that late messages of an abandoned batch are not mixed in
    messages: list[Stored] = []
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
            if status == "404":  # nothing at or after `first`
                return messages, 0
            if status == "503":  # either there is no such stream (raises), or the server is still starting
                await extent(client, stream)
                return messages, None
            if status not in {None, "204"}:
                what = next((v for k, v in headers.items() if k.lower() == "description"), "")
                raise TorchLoomError(f"stream {stream} cannot be read: {status} {what}".rstrip())
            if int(headers["Nats-Last-Sequence"]) != (messages[-1].seq if messages else 0):
                return messages, None
            if status == "204":
                return messages, int(headers["Nats-Num-Pending"])
            sequence = int(headers["Nats-Sequence"])
            if sequence < first:
                return messages, None
            messages.append(Stored(sequence, message.data, headers["Nats-Subject"]))
    except (nats.errors.Error, OSError):  # if the connection is closed, the next attempt says so
        return messages, None
    finally:
        with suppress(nats.errors.Error, OSError):
            await subscription.unsubscribe()


async def extent(client: Client, stream: str) -> Extent:
    """What a stream holds at this moment."""
    for attempt in range(ATTEMPTS):
        try:
            reply = await client.request(f"$JS.API.STREAM.INFO.{stream}", b"", timeout=PATIENCE)
        except (nats.errors.Error, OSError) as error:
            if client.is_closed or attempt == ATTEMPTS - 1:
                raise Unreachable(f"the server does not say what stream {stream} holds: {error}") from error
            await asyncio.sleep(_PAUSE)
            continue
        answer = decoder(dict)(reply.data)
        if answer.get("error", {}).get("code") == 404:
            raise Unreachable(f"there is no stream {stream} yet", hint="the weaver makes it when it starts: `loom up`")
        if "error" in answer:
            raise TorchLoomError(f"stream {stream}: {answer['error'].get('description', 'unknown error')}")
        return Extent(answer["state"]["first_seq"], answer["state"]["last_seq"])
    raise AssertionError("the loop ends by return or raise")


async def store_once(client: Client, subject: str, data: bytes, id: str, timeout: float = 2.0) -> None:
    """Store a message in the stream of its subject. Repetitions have the same id, and the server drops them."""
    await client.jetstream().publish(subject, data, timeout=timeout, headers={"Nats-Msg-Id": id})


async def store_expected(
    client: Client, stream: Stream, subject: str, data: bytes, headers: dict[str, str], timeout: float = 2.0
) -> int | None:
    """Store a message if what its headers expect is true: its sequence; None if it is not."""
    js = client.jetstream(timeout=timeout)
    try:
        return int((await js.publish(subject, data, stream=stream.name, headers=headers)).seq)
    except nats.js.errors.APIError as error:
        if error.err_code == _WRONG_LAST_SEQUENCE:
            return None
        raise


async def write_verdict(client: Client, job: str, change: str, commit: bool, timeout: float = 2.0) -> bool:
    """Write a verdict on a change unless one stands; whether the one that stands is commit."""
    committed = COMMIT.to(job=job, change=change)
    headers = {
        "Nats-Expected-Last-Subject-Sequence": "0",
        "Nats-Expected-Last-Subject-Sequence-Subject": committed.rpartition(".")[0] + ".*",
    }
    subject = committed if commit else ABORT.to(job=job, change=change)
    if await store_expected(client, VERDICT_STREAM, subject, b"", headers, timeout) is not None:
        return commit
    ask = msgspec.json.encode({"last_by_subj": committed})
    reply = await client.request(f"$JS.API.DIRECT.GET.{VERDICT_STREAM.name}", ask, timeout=timeout)
    return (reply.headers or {}).get("Status") != "404"
