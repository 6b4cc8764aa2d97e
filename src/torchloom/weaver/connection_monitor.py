"""What the weaver observes by itself: who is connected, whether the server answers, whether a lost process has ended.

**Connections.** The server notices a killed process as soon as the kernel closes its socket, also on another machine,
and publishes that on a subject of the system account. It publishes nothing about the time in which it or the weaver was
away; after each absence the weaver therefore asks it who is connected (the roll-call).

**The server.** A server that hangs keeps its connections open and sends nothing. A ping is always in progress; when it
is answered, the next one is sent. The answer comes after everything that was sent before it, so under load it is late;
but then other messages arrive, and the server is alive. No ping is given up: the late answer to an abandoned one would
end nats-py's reading, on a connection that looks well for seconds.

**Processes.** An agent observes the ranks that it started. No agent observes those of a plain torchrun, and after a
connection has closed their process may still run. It matters for replicas under torchft: the others wait for one that
may be alive. So the weaver asks the kernel, where it can: on its own machine. The answer goes through the inbox, behind
a goodbye that the rank may have sent.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import msgspec
import nats.errors
from nats.aio.client import Client
from nats.aio.msg import Msg

from torchloom.bus.connection import parse_connection_name
from torchloom.bus.tasks import TaskSet
from torchloom.core.events import LinkClosed, LinkEvent, LinkOpened
from torchloom.core.state.cluster import ClusterState
from torchloom.core.state.rank_states import Presence, Rank
from torchloom.core.state.runtime import Life
from torchloom.protocol.codec import encode
from torchloom.protocol.facts import RankExited
from torchloom.protocol.ids import RankId
from torchloom.protocol.subjects import FACT
from torchloom.shared.json_decoding import decoder
from torchloom.shared.process_id import has_ended

EVERYONE = 65_536
"""Most connections in one answer: all of them, so that none is missed between two pages."""

QUIET = 4
"""Consecutive calls of `answers` without any message in between, after which the server counts as hanging. Calls, not
seconds: they are as far apart as our own loop is slow."""
PING_SECONDS = 60.0
"""Much longer than the client itself keeps a connection that does not answer."""

EXIT_PAUSES = (0.0, 0.005, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0)
"""Seconds before each check: connections close a moment before the process ends. The last one is repeated."""
Send = Callable[[str, bytes], Awaitable[None]]


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


_advisory = decoder(_Advisory)
_connz = decoder(_ConnzReply)


@dataclass(eq=False)
class ConnectionAdvisories:
    client: Client
    account: str

    async def listen(self, report: Callable[[LinkEvent], None]) -> None:
        async def on_advisory(message: Msg) -> None:
            advisory = _advisory(message.data)
            life = parse_connection_name(advisory.client.name)
            if life is None:
                return  # not the connection of a rank
            link = f"{advisory.server.id}:{advisory.client.id}"
            if message.subject.endswith(".DISCONNECT"):
                report(LinkClosed(*life, link=link, reason=advisory.reason))
            else:
                report(LinkOpened(*life, link=link))

        for kind in ("CONNECT", "DISCONNECT"):
            await self.client.subscribe(f"$SYS.ACCOUNT.{self.account or '*'}.{kind}", cb=on_advisory)
        await self.client.flush()

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
            reply = await self.client.request(f"$SYS.REQ.SERVER.{server}.CONNZ", self._options(EVERYONE), timeout=5)
            for connection in (_connz(reply.data).data or _Connz()).connections:
                life = parse_connection_name(connection.name)
                if life is not None:
                    present.setdefault(life, set()).add(f"{server}:{connection.cid}")
        return present

    async def _servers(self) -> list[str]:
        """Each server answers a ping. Their number is not known, so this waits until no more answers come."""
        inbox = self.client.new_inbox()
        subscription = await self.client.subscribe(inbox)
        try:
            await self.client.publish("$SYS.REQ.SERVER.PING.CONNZ", self._options(1), reply=inbox)
            servers = {_connz((await subscription.next_msg(timeout=2)).data).server.id}
            while True:
                try:
                    servers.add(_connz((await subscription.next_msg(timeout=0.2)).data).server.id)
                except nats.errors.TimeoutError:
                    return sorted(servers)
        finally:
            await subscription.unsubscribe()

    def _options(self, limit: int) -> bytes:
        return msgspec.json.encode({"limit": limit, "acc": self.account})


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


class ProcessExitProbe:
    def __init__(self, cluster: ClusterState, send: Send, pauses: Sequence[float] = EXIT_PAUSES) -> None:
        self._cluster = cluster
        self._send = send
        self._pauses = pauses
        self.tasks = TaskSet()

    def watch(self, id: RankId) -> None:
        """Watch the process of a lost rank, if it is a member of a quorum and no agent watches it."""
        rank = self._cluster.ranks.get(id)
        if rank is not None and rank.member and rank.process and self._cluster.runs.of(id.replica_id) is None:
            self.tasks.start(self._wait_for_exit(rank))

    async def _wait_for_exit(self, rank: Rank) -> None:
        for pause in itertools.chain(self._pauses, itertools.repeat(self._pauses[-1])):
            await asyncio.sleep(pause)
            now = self._cluster.ranks.get(rank.id)
            if now is None or now.incarnation != rank.incarnation or now.presence is not Presence.LOST:
                return  # it is back, or given up
            if has_ended(rank.process):
                fact = RankExited(**rank.id._asdict(), incarnation=rank.incarnation)
                await self._send(FACT.to(source="weaver"), encode(fact))
                return
