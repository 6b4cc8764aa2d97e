"""What the passage of time brings: ticks, passes over all ranks, and roll-calls after an absence."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import msgspec
import nats.errors
from nats.aio.client import Client

from torchloom.core.engine import Engine
from torchloom.weaver.connection_monitor import ConnectionAdvisories, ServerLiveness
from torchloom.weaver.event_queue import EventQueue
from torchloom.weaver.health import Clock, log

TICK_SECONDS = 0.25
TICKS_PER_PASS = 4
"""Ticks between two passes over all ranks."""


@dataclass(eq=False)
class Ticker:
    engine: Engine
    queue: EventQueue
    client: Client
    advisories: ConnectionAdvisories | None
    clock: Clock

    def __post_init__(self) -> None:
        self._runtime = self.engine.cluster.runtime
        self._settings = self.engine.cluster.settings
        self._server = ServerLiveness(self.client)
        self._pass_due = asyncio.Event()

    def restart(self) -> None:
        """The connection to the server is back after a break, and nothing was announced in between."""
        log.info("connected again; the roll is called in %g s", self._settings.reunion_seconds)
        self._server.reset()
        self.engine.restart(self.clock())

    async def tick(self) -> None:
        last, count, deaf = self.clock(), 0, False
        while True:
            await asyncio.sleep(TICK_SECONDS)
            now = self.clock()
            if now - last > self._settings.nap_seconds:
                log.warning("suspended for %.1f s; every timer restarts", now - last)
                self.engine.restart(now)
            last = now
            if not self._server.answers():
                deaf = True
                continue  # a silent rank may only be unheard
            if deaf:
                log.warning("the server answers again; every timer restarts")
                self.engine.restart(self.clock())
                deaf = False
            if self._runtime.reunion and now >= self._runtime.blind_until:
                await self._call_roll()
            if self.queue.empty():
                count += 1
                for event in self.engine.tick(now):
                    await self.queue.put((event, 0))
                if count % TICKS_PER_PASS == 0:
                    self._pass_due.set()

    async def look(self) -> None:
        """Pass after pass over all ranks; between two slices of a pass everything else has its turn."""
        while True:
            await self._pass_due.wait()
            self._pass_due.clear()
            for events in self.engine.check_ranks(self.clock()):
                for event in events:
                    self.queue.offer(event)
                await asyncio.sleep(0)

    async def _call_roll(self) -> None:
        if self.advisories is None:
            self._runtime.reunion = False  # no one to ask: an absent rank shows by its silence
            return
        self._runtime.ask_roll()
        try:
            present = await self.advisories.roll_call()
        except (nats.errors.Error, msgspec.MsgspecError, OSError) as error:
            log.warning("the roll-call was not answered (%s); once more", error or type(error).__name__)
            return
        await self.queue.put((self.engine.hear_roll(present), 0))
