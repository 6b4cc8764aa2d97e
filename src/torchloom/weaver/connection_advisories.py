"""Hearing of deaths from the server: its announcements of connects and disconnects, and the roll-call.

The server notices a killed process as soon as the kernel closes its socket, across machines too, and says so on a
subject of the system account. Nothing is announced for what happens while the server or we are away; therefore after
every absence the server is asked who is connected.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import msgspec
import nats.errors
from nats.aio.client import Client
from nats.aio.msg import Msg

from torchloom.bus.connection_names import parse_connection_name
from torchloom.core.events import LinkClosed, LinkOpened
from torchloom.core.state.runtime import Life

log = logging.getLogger("torchloom.weaver")

EVERYONE = 65_536
"""Connections in one answer: all at once, so that none slips between two pages."""


class _Server(msgspec.Struct):
    id: str = ""


class _Client(msgspec.Struct):
    id: int = 0
    name: str = ""


class _Advisory(msgspec.Struct):
    """The part we use of `io.nats.server.advisory.v1.client_connect` and `client_disconnect`."""

    server: _Server
    client: _Client
    reason: str = ""


class _Connection(msgspec.Struct):
    cid: int
    name: str = ""


class _Connz(msgspec.Struct):
    connections: list[_Connection] = []


class _ConnzReply(msgspec.Struct):
    server: _Server
    data: _Connz | None = None


_advisory = msgspec.json.Decoder(_Advisory).decode
_connz = msgspec.json.Decoder(_ConnzReply).decode


class ConnectionAdvisories:
    def __init__(self, client: Client, account: str) -> None:
        self._client = client
        self._account = account
        self._tell: Callable[[LinkOpened | LinkClosed], None]

    async def listen(self, tell: Callable[[LinkOpened | LinkClosed], None]) -> None:
        self._tell = tell
        account = self._account or "*"
        await self._client.subscribe(f"$SYS.ACCOUNT.{account}.CONNECT", cb=self._on_connect)
        await self._client.subscribe(f"$SYS.ACCOUNT.{account}.DISCONNECT", cb=self._on_disconnect)
        await self._client.flush()

    async def _on_connect(self, message: Msg) -> None:
        told = _advisory(message.data)
        named = parse_connection_name(told.client.name)
        if named is not None:
            self._tell(LinkOpened(*named, link=f"{told.server.id}:{told.client.id}"))

    async def _on_disconnect(self, message: Msg) -> None:
        told = _advisory(message.data)
        named = parse_connection_name(told.client.name)
        if named is not None:
            self._tell(LinkClosed(*named, link=f"{told.server.id}:{told.client.id}", reason=told.reason))

    async def works(self) -> bool:
        """Whether the server answers in its system account: a credential for another server would be deaf."""
        try:
            await self.roll_call()
        except (nats.errors.Error, msgspec.MsgspecError, OSError):
            return False
        return True

    async def roll_call(self) -> dict[Life, set[str]]:
        """Who is connected now, at every server of the cluster. Raises nats errors if no server answers."""
        present: dict[Life, set[str]] = {}
        for server in await self._servers():
            reply = await self._client.request(f"$SYS.REQ.SERVER.{server}.CONNZ", self._options(EVERYONE), timeout=5)
            for connection in (_connz(reply.data).data or _Connz()).connections:
                named = parse_connection_name(connection.name)
                if named is not None:
                    present.setdefault(named, set()).add(f"{server}:{connection.cid}")
        return present

    async def _servers(self) -> list[str]:
        """Each server answers a ping; there is no saying how many, so we listen until it is quiet."""
        inbox = self._client.new_inbox()
        subscription = await self._client.subscribe(inbox)
        try:
            await self._client.publish("$SYS.REQ.SERVER.PING.CONNZ", self._options(1), reply=inbox)
            found = [_connz((await subscription.next_msg(timeout=2)).data).server.id]
            while True:
                try:
                    found.append(_connz((await subscription.next_msg(timeout=0.2)).data).server.id)
                except nats.errors.TimeoutError:
                    return sorted(set(found))
        finally:
            await subscription.unsubscribe()

    def _options(self, limit: int) -> bytes:
        options: dict[str, object] = {"limit": limit}
        if self._account:
            options["acc"] = self._account
        return msgspec.json.encode(options)
