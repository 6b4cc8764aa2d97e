"""Connects a lighthouse to NATS: it receives evictions from the weaver and reports its quorums in beats.

Replicas do not depend on NATS. Without it no replica is evicted, and the heartbeat timeout decides, as in torchft's own
lighthouse. The weaver knows that an eviction has arrived when a beat shows it.
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

from torchloom.bus.connection import close_quietly, connect, find, is_denied
from torchloom.bus.tasks import set_within
from torchloom.errors import TorchLoomError
from torchloom.lighthouse.quorum_service import QuorumService
from torchloom.protocol.codec import decode_evict, encode
from torchloom.protocol.ids import NAME
from torchloom.protocol.lighthouse import LighthouseBeat
from torchloom.protocol.subjects import EVICT, QUORUM, Role
from torchloom.settings import Settings
from torchloom.shared.incarnation import new_incarnation
from torchloom.views.wording.phrases import render

log = logging.getLogger("torchloom.lighthouse")

BEAT_SECONDS: Final = 1.0
MOST_MEMBERS: Final = 1000
"""Most entries of one list in a beat."""
MOST_STORE: Final = 300


class NatsReporter:
    """The NATS side of one lighthouse."""

    def __init__(self, settings: Settings, job: str, service: QuorumService, url: str) -> None:
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
        """Run until cancelled. No failure here stops the lighthouse from serving."""
        while True:
            client = await self._reach()
            try:
                await self._converse(client)
            except (nats.errors.Error, OSError) as error:
                log.warning("reporting through NATS failed: %s", error or type(error).__name__)
                await asyncio.sleep(self._settings.reconnect_seconds)
            finally:
                self._there = False  # closed by this process, not lost
                await close_quietly(client)

    async def _converse(self, client: Client) -> None:
        """Send beats until the connection is closed permanently, as by an expired credential."""
        await client.subscribe(EVICT.to(job=self._job), cb=self._on_evict)
        while not client.is_closed:
            self._news.clear()
            if client.is_connected:  # otherwise outdated beats would be buffered and sent later
                with contextlib.suppress(nats.errors.Error, OSError):
                    await client.publish(QUORUM.to(job=self._job), encode(self.beat()))
            await set_within(self._news, BEAT_SECONDS)

    async def _reach(self) -> Client:
        """Connect, trying until it succeeds; nats-py then reconnects by itself."""
        warning = ""
        while True:
            try:
                client = await connect(
                    find(self._settings, Role.THREADLET), name=f"lighthouse {self._job}", keep_trying=True,
                    on_error=self._on_error, on_lost=self._on_lost, on_back=self._on_back,
                )  # fmt: skip
            except TorchLoomError as error:
                if error.message != warning:
                    warning = error.message
                    log.warning("%s: serving without it; no replica is evicted before the heartbeat timeout", warning)
                await asyncio.sleep(self._settings.reconnect_seconds)
            else:
                self._there = True
                log.info("evictions are received through NATS at %s", find(self._settings, Role.THREADLET))
                return client

    def beat(self) -> LighthouseBeat:
        """What is on disk, so that the weaver relies on nothing that a restart loses; and who waits now."""
        durable, state = self._service.store.durable, self._service.state
        return LighthouseBeat(
            incarnation=self._incarnation,
            address=self._url,
            quorum=durable.quorum,
            members=self._names(id for id in durable.members if id not in state.evicted),
            waiting=self._names(sorted(state.waiting)),
            evicted=self._names(durable.evicted),
            broken=durable.broken,
            stores={
                id: where[:MOST_STORE] for id, where in list(state.stores.items())[-MOST_MEMBERS:] if NAME.fullmatch(id)
            },
            min_replicas=self._service.rules.min_replicas,
        )

    def _names(self, ids: Iterable[str]) -> tuple[str, ...]:
        """The last of these ids that a message can contain."""
        names = []
        for id in ids:
            if NAME.fullmatch(id):
                names.append(id)
            elif id not in self._nameless and len(self._nameless) < MOST_MEMBERS:
                self._nameless.add(id)
                log.warning("%r trains, but cannot be reported: names have other characters", id)
        return tuple(names[-MOST_MEMBERS:])

    async def _on_evict(self, message: Msg) -> None:
        try:
            evict = decode_evict(message.data)
        except msgspec.MsgspecError as error:
            log.warning("not understood on %s: %s", message.subject, error)
            return
        if evict.term < self._term:
            log.warning("an eviction by a replaced weaver (term %d) is ignored", evict.term)
            return
        self._term = evict.term
        self._service.evict(evict.members, render(evict.reason))
        self._news.set()  # also for a repeated eviction: the weaver has not received the beat

    async def _on_error(self, error: Exception) -> None:
        if is_denied(error):
            log.error("%s", error)

    async def _on_lost(self) -> None:
        if self._there:  # nats-py calls this after every failed attempt
            log.warning("NATS is gone: serving without it; no replica is evicted before the heartbeat timeout")
        self._there = False

    async def _on_back(self) -> None:
        log.info("NATS is back")
        self._there = True
        self._term = 0  # it may be a new control plane, whose terms start at one
        self._news.set()
