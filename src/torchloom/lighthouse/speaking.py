"""A lighthouse on NATS: it hears whom the weaver evicts, and tells what it has decided.

Replicas do not notice whether NATS is there. Without it nobody is evicted on knowledge, and the heartbeat timeout
decides, as in torchft's own lighthouse; a beat that shows an eviction is what tells the weaver that it has arrived.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Iterable
from typing import Final

import msgspec
import nats.errors
from nats.aio.client import Client
from nats.aio.msg import Msg

from torchloom.bus.client import connect, find
from torchloom.errors import TorchLoomError
from torchloom.lighthouse.service import Service
from torchloom.messages import NAME, LighthouseBeat, decode_evict, encode
from torchloom.settings import Settings
from torchloom.subjects import EVICT, QUORUM, Role
from torchloom.threadlet.incarnation import new_incarnation

log = logging.getLogger("torchloom.lighthouse")

BEAT_SECONDS: Final = 1.0
MOST_MEMBERS: Final = 1000
"""In one list of a beat."""
MOST_STORE: Final = 300


class Voice:
    """Speaks for one lighthouse."""

    def __init__(self, settings: Settings, job: str, service: Service, url: str) -> None:
        self._settings = settings
        self._job = job
        self._service = service
        self._url = url
        self._incarnation = new_incarnation()
        self._news = asyncio.Event()
        self._term = 0
        self._there = False
        self._nameless: set[str] = set()
        service.changed = self._news.set

    async def run(self) -> None:
        """Until cancelled. Nothing that happens here keeps the lighthouse from serving."""
        while True:
            client = await self._reach()
            try:
                await self._converse(client)
            except (nats.errors.Error, OSError) as error:
                log.warning("speaking through NATS failed: %s", error or type(error).__name__)
                await asyncio.sleep(self._settings.reconnect_seconds)
            finally:
                self._there = False  # it is closed here, and not gone
                with contextlib.suppress(Exception):
                    await asyncio.wait_for(client.close(), 1)

    async def _converse(self, client: Client) -> None:
        """As long as the connection comes back by itself; an expired credential ends it."""
        await client.subscribe(EVICT.to(job=self._job), cb=self._on_evict)
        while not client.is_closed:
            self._news.clear()
            await self._tell(client)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._news.wait(), BEAT_SECONDS)

    async def _reach(self) -> Client:
        """A connection, whenever there can be one; nats-py then keeps it."""
        said = ""
        while True:
            try:
                client = await connect(
                    find(self._settings, Role.THREADLET), name=f"lighthouse {self._job}", keep_trying=True,
                    on_error=self._on_error, on_lost=self._on_lost, on_back=self._on_back,
                )  # fmt: skip
            except TorchLoomError as error:
                if error.message != said:
                    said = error.message
                    log.warning("%s: serving without it; nobody is evicted before the heartbeat timeout", said)
                await asyncio.sleep(self._settings.reconnect_seconds)
            else:
                self._there = True
                log.info("evictions are heard through NATS at %s", find(self._settings, Role.THREADLET))
                return client

    async def _tell(self, client: Client) -> None:
        if client.is_connected:  # or old beats would wait, and be told when they are not true any more
            with contextlib.suppress(nats.errors.Error, OSError):
                await client.publish(QUORUM.to(job=self._job), encode(self.beat()))

    def beat(self) -> LighthouseBeat:
        """What is on disk, so that nothing is believed which a restart forgets; and who waits now."""
        kept, state = self._service.keeping.kept, self._service.state
        return LighthouseBeat(
            incarnation=self._incarnation,
            address=self._url,
            quorum=kept.quorum,
            members=self._names(id for id in kept.members if id not in state.evicted),
            waiting=self._names(sorted(state.waiting)),
            evicted=self._names(kept.evicted),
            broken=kept.broken,
            stores={
                id: where[:MOST_STORE] for id, where in list(state.stores.items())[-MOST_MEMBERS:] if NAME.fullmatch(id)
            },
            min_replicas=self._service.rules.min_replicas,
        )

    def _names(self, ids: Iterable[str]) -> tuple[str, ...]:
        """The last so many of those that can stand in a message."""
        names = []
        for id in ids:
            if NAME.fullmatch(id):
                names.append(id)
            elif id not in self._nameless and len(self._nameless) < MOST_MEMBERS:
                self._nameless.add(id)
                log.warning("%r trains, but nobody can be told of it: names have other characters", id)
        return tuple(names[-MOST_MEMBERS:])

    async def _on_evict(self, message: Msg) -> None:
        try:
            evict = decode_evict(message.data)
        except msgspec.MsgspecError as error:
            log.warning("not understood on %s: %s", message.subject, error)
            return
        if evict.term < self._term:
            log.warning("a weaver of the past (term %d) wants to evict: not done", evict.term)
            return
        self._term = evict.term
        self._service.evict(evict.members, evict.reason)
        self._news.set()  # also if it was known: who asks has not heard

    async def _on_error(self, error: Exception) -> None:
        if "permissions violation" in str(error).lower():
            log.error("%s", error)

    async def _on_lost(self) -> None:
        if self._there:  # nats-py says it after every attempt that fails
            log.warning("NATS is gone: serving without it; nobody is evicted before the heartbeat timeout")
        self._there = False

    async def _on_back(self) -> None:
        log.info("NATS is back")
        self._there = True
        self._term = 0  # it may be another control plane, whose weavers count from one again
        self._news.set()
