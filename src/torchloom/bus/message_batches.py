"""The messages of one subscription in batches, past the queue of nats-py.

nats-py puts each message into the queue of its subscription, from which a task takes it and awaits a callback. That is
a fifth of all that the weaver does for a beat, and a large fleet sends ten thousand beats a second.

But nats-py makes each message with `Client.msg_class`, and passes on only what that returns. So the messages of this
subscription go from there into a list, which is handed over when the event loop gets to it. The list needs no limit:
the loop gets to it before it reads from the connection again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

from nats.aio.client import Client
from nats.aio.msg import Msg

Batch = Iterator[tuple[str, bytes]]
"""Messages in the order of their arrival: the subject and the data of each."""


class MessageBatches:
    """`await client.subscribe(subject, cb=MessageBatches(client, take).on_message)`; one for each client at most."""

    def __init__(self, client: Client, take: Callable[[Batch], None]) -> None:
        self._client = client
        self._take = take
        self._make_other = client.msg_class
        self._sid: int | None = None
        """The number of the subscription at the server, as its first message tells it."""
        self._messages: list[tuple[str, bytes]] = []

    async def on_message(self, message: Msg) -> None:
        """Take the first message, and those that were in the queue by then. No later one comes this way."""
        self._put(message.subject, message.data)
        if self._sid is None:
            self._sid = message.sid
            self._client.msg_class = self._make

    def _make(self, *, _sid: int, **fields: Any) -> Msg | None:
        if _sid == self._sid:
            self._put(fields["subject"], fields["data"])
            return None
        return self._make_other(_sid=_sid, **fields)

    def _put(self, subject: str, data: bytes) -> None:
        if not self._messages:
            asyncio.get_running_loop().call_soon(self._hand_over)
        self._messages.append((subject, data))

    def _hand_over(self) -> None:
        batch = iter(self._messages)
        try:
            self._take(batch)
        finally:
            self._messages = list(batch)  # none, unless one of them has raised an error
            if self._messages:
                asyncio.get_running_loop().call_soon(self._hand_over)
