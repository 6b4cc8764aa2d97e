"""What the passage of time brings: ticks, passes over all ranks, and roll-calls after an absence."""

from __future__ import annotations

import asyncio
import logging

import msgspec
import nats.errors
from nats.aio.client import Client

from torchloom.core.engine import Engine
from torchloom.weaver.connection_advisories import ConnectionAdvisories
from torchloom.weaver.event_queue import EventQueue, Waiting
from torchloom.weaver.health import Clock
from torchloom.weaver.server_liveness import ServerLiveness

log = logging.getLogger("torchloom.weaver")

TICK_SECONDS = 0.25
TICKS_PER_PASS = 4
"""Ticks between two passes over all ranks."""


class Ticker:
    def __init__(
        self, engine: Engine, queue: EventQueue, client: Client, advisories: ConnectionAdvisories | None, clock: Clock
    ) -> None:
        self._engine = engine
        self._runtime = engine.cluster.runtime
        self._settings = engine.cluster.settings
        self._queue = queue
        self._advisories = advisories
        self._clock = clock
        self._server = ServerLiveness(client)
        self._pass_due = asyncio.Event()

    def restart(self) -> None:
        """The connection to the server is back after a break, and nothing was announced in between."""
        log.info("connected again; the roll is called in %g s", self._settings.reunion_seconds)
        self._server.reset()
        self._engine.restart(self._clock())

    async def tick(self) -> None:
        last, count, deaf = self._clock(), 0, False
        while True:
            await asyncio.sleep(TICK_SECONDS)
            now = self._clock()
            if now - last > self._settings.nap_seconds:
                log.warning("suspended for %.1f s; every timer restarts", now - last)
                self._engine.restart(now)
            last = now
            if not self._server.answers():
                deaf = True
                continue  # a silent rank may only be unheard
            if deaf:
                log.warning("the server answers again; every timer restarts")
                self._engine.restart(self._clock())
                deaf = False
            if self._runtime.reunion and now >= self._runtime.blind_until:
                await self._call_roll()
            if self._queue.empty():
                count += 1
                for event in self._engine.tick(now):
                    self._queue.put(event)
                if count % TICKS_PER_PASS == 0:
                    self._pass_due.set()

    async def look(self) -> None:
        """Pass after pass over all ranks; between two slices of a pass everything else has its turn."""
        while True:
            await self._pass_due.wait()
            self._pass_due.clear()
            for events in self._engine.check_ranks(self._clock()):
                for event in events:
                    self._queue.offer(Waiting(event))
                await asyncio.sleep(0)

    async def _call_roll(self) -> None:
        if self._advisories is None:
            self._runtime.reunion = False  # no one to ask: an absent rank shows by its silence
            return
        self._runtime.ask_roll()
        try:
            present = await self._advisories.roll_call()
        except (nats.errors.Error, msgspec.MsgspecError, OSError) as error:
            log.warning("the roll-call was not answered (%s); once more", error or type(error).__name__)
            return
        self._queue.put(self._engine.hear_roll(present))
