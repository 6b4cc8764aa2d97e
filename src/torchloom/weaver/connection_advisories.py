"""The server's advisories of connects and disconnects, and the roll-call.

The server notices a killed process as soon as the kernel closes its socket, also on another machine, and publishes that
on a subject of the system account. It publishes nothing about the time in which it or the weaver was away; after each
absence the weaver therefore asks it who is connected.
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
"""Most connections in one answer: all of them, so that none is missed between two pages."""


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
        self._report: Callable[[LinkOpened | LinkClosed], None]

    async def listen(self, report: Callable[[LinkOpened | LinkClosed], None]) -> None:
        self._report = report
        for kind in ("CONNECT", "DISCONNECT"):
            await self._client.subscribe(f"$SYS.ACCOUNT.{self._account or '*'}.{kind}", cb=self._on_advisory)
        await self._client.flush()

    async def _on_advisory(self, message: Msg) -> None:
        advisory = _advisory(message.data)
        life = parse_connection_name(advisory.client.name)
        if life is None:
            return  # not the connection of a rank
        link = f"{advisory.server.id}:{advisory.client.id}"
        if message.subject.endswith(".DISCONNECT"):
            self._report(LinkClosed(*life, link=link, reason=advisory.reason))
        else:
            self._report(LinkOpened(*life, link=link))

    async def works(self) -> bool:
        """Whether the server answers in its system account: with credentials of another server nothing would arrive."""
        try:
            await self.roll_call()
        except (nats.errors.Error, msgspec.MsgspecError, OSError):
            return False
        return True

    async def roll_call(self) -> dict[Life, set[str]]:
        """Which ranks are connected now, at every server of the cluster. Raises nats errors if no server answers."""
        present: dict[Life, set[str]] = {}
        for server in await self._servers():
            reply = await self._client.request(f"$SYS.REQ.SERVER.{server}.CONNZ", self._options(EVERYONE), timeout=5)
            for connection in (_connz(reply.data).data or _Connz()).connections:
                life = parse_connection_name(connection.name)
                if life is not None:
                    present.setdefault(life, set()).add(f"{server}:{connection.cid}")
        return present

    async def _servers(self) -> list[str]:
        """Each server answers a ping. Their number is not known, so this waits until no more answers come."""
        inbox = self._client.new_inbox()
        subscription = await self._client.subscribe(inbox)
        try:
            await self._client.publish("$SYS.REQ.SERVER.PING.CONNZ", self._options(1), reply=inbox)
            servers = {_connz((await subscription.next_msg(timeout=2)).data).server.id}
            while True:
                try:
                    servers.add(_connz((await subscription.next_msg(timeout=0.2)).data).server.id)
                except nats.errors.TimeoutError:
                    return sorted(servers)
        finally:
            await subscription.unsubscribe()

    def _options(self, limit: int) -> bytes:
        options: dict[str, object] = {"limit": limit}
        if self._account:
            options["acc"] = self._account
        return msgspec.json.encode(options)
