"""The thread that ties a rank to NATS: connect, talk, and when that ends, look anew and connect again.

A server that is not there yet, was restarted, moved to another port or refused an expired credential is always the
same: the connection is over, the address is resolved again, and a new connection says hello. Nothing here ever raises
into the training or makes it wait, except for the moments of a goodbye.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import importlib.metadata
import logging
import os
import threading
import time
from collections.abc import Callable
from random import SystemRandom

from nats.aio.client import Client

import torchloom
from torchloom.bus.client import Address, connect, find
from torchloom.bus.names import connection_name
from torchloom.messages import Hello
from torchloom.process import process_id
from torchloom.settings import Settings
from torchloom.subjects import Role
from torchloom.threadlet.conversation import Conversation, Over
from torchloom.threadlet.ending import Ending
from torchloom.threadlet.helm import Helm
from torchloom.threadlet.life import Life
from torchloom.threadlet.loop import LinkLoop
from torchloom.threadlet.membership import Membership
from torchloom.threadlet.meter import Meter
from torchloom.threadlet.names import LAUNCHER, Names
from torchloom.threadlet.orders import Orders
from torchloom.threadlet.outbox import News
from torchloom.threadlet.probe import find_devices
from torchloom.threadlet.readings import Reader
from torchloom.threadlet.signs import TICK_SECONDS, Signs

logger = logging.getLogger("torchloom")
FIRST_PAUSE = 0.05
CLOSE_SECONDS = 1.0
JOIN_SECONDS = 0.1
_chance = SystemRandom()
THREAD = "torchloom-link"


class Link:
    def __init__(
        self,
        names: Names,
        incarnation: str,
        meter: Meter,
        helm: Helm,
        settings: Settings,
        devices: tuple[str, ...] | None,
        signs: Signs,
    ) -> None:
        self.life = Life(names.rank, incarnation, settings.beat_seconds)
        self.up = False
        self._names = names
        self._meter = meter
        self._helm = helm
        self.signs = signs
        self._orders = Orders(helm)
        self._talk: Conversation | None = None
        self._settings = settings
        self._devices = devices
        self.counted = False
        """The script has not attached."""
        self._reader = Reader()
        self._loop = LinkLoop()
        self._thread = threading.Thread(target=self._run, name=THREAD, daemon=True)
        self._tried = False
        """The first attempt to connect has ended, one way or the other."""
        self._troubled = False
        """An outage is going on, and was told."""
        self._leaving = asyncio.Event()
        self._leave_by = 0.0
        self._ending = Ending()
        self._gone = threading.Event()
        self._started = threading.Event()
        """Welcomed, or there is nobody to be welcomed by."""
        helm.answer = lambda reply: self._soon(lambda talk: talk.spawn(talk.reply(reply)))
        helm.resolve = lambda change: self._soon(lambda talk: talk.spawn(talk.resolve(change)))
        helm.announce = lambda: self._soon(lambda talk: talk.more.set())
        helm.linked = lambda: self.up

    # ── called by the training ───────────────────────────────────────────────────────────────────────────────────────

    def start(self) -> None:
        logging.getLogger("asyncio").addFilter(_worth_telling)  # adding it again changes nothing
        self._thread.start()

    def await_welcome(self) -> None:
        """Wait a moment for the values in force, so that the first step has them; not where nobody answers."""
        self._started.wait(self._settings.welcome_seconds)

    def tell(self, news: News) -> None:
        """Let the weaver know, now or when there is a connection again. From any thread."""
        if not self._gone.is_set():
            self.life.outbox.put(news)
            self._soon(lambda talk: talk.news.set())

    def join(self, member: Membership) -> None:
        """The rank belongs to a torchft replica: say so, and listen to what its lighthouse decides."""
        self.life.member = member
        self._soon(lambda talk: talk.spawn(talk.belong()))

    def set_devices(self, devices: tuple[str, ...] | None) -> None:
        """What the script says it computes on; None leaves what was found."""
        self._devices = devices or self._devices

    def introduce(self) -> None:
        """Say hello again: what it says has changed."""
        self._soon(lambda talk: talk.introduce_anew())

    def _soon(self, work: Callable[[Conversation], None]) -> None:
        """Have the link do something on the connection it has, if it has one."""

        def begin() -> None:
            if self._talk is not None:
                work(self._talk)

        with contextlib.suppress(RuntimeError):  # the loop is closed: there is no link any more
            self._loop.call_soon_threadsafe(begin)

    def goodbye(self, ending: Ending) -> None:
        """Say how it ended, and wait until that is known, but only briefly, and not at all where nobody listens."""
        seconds = self._settings.goodbye_seconds
        self._ending, self._leave_by = ending, time.monotonic() + seconds
        try:
            self._loop.call_soon_threadsafe(self._leaving.set)
        except RuntimeError:  # its loop is closed: it ended before
            return
        if self.up or not self._tried:
            self._gone.wait(seconds)
        # A daemon thread that is inside C code while the interpreter is taken down is best not there any more.
        self._thread.join(JOIN_SECONDS)

    def disown(self) -> None:
        """In a forked child: the connection is the parent's, and so is the loop."""
        self.up = False
        self.signs.disown()
        # The loop must never be finalised here: its epoll is shared, so unregistering would deafen the parent.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self))
        self._loop.forget_after_fork()

    # ── the thread ───────────────────────────────────────────────────────────────────────────────────────────────────

    def _run(self) -> None:
        try:
            with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
                runner.run(self._live())
        except Exception as error:  # noqa: BLE001  the last door before the training
            logger.warning("torchLoom: the link ended by an error, training goes on: %r", error)
        finally:
            self.up = False
            self._tried = True
            self.signs.say_leaving()  # it does not tick any more
            self._reader.close()
            self._gone.set()
            self._started.set()

    async def _tick_on(self) -> None:
        """With a connection or without."""
        while True:
            self.signs.tick()
            await asyncio.sleep(TICK_SECONDS)

    async def _live(self) -> None:
        ticking = asyncio.ensure_future(self._tick_on())
        try:
            await self._seek()
        finally:
            ticking.cancel()

    async def _seek(self) -> None:
        """Connect, talk, and connect again."""
        if self._devices is None:  # apart, because a driver may take its time to answer
            visible, local, node = os.environ.get("CUDA_VISIBLE_DEVICES"), self._names.local_rank, self._names.node
            found = await self._loop.apart(lambda: find_devices(visible, local, node))
            self._devices = self._devices or found
        pause = FIRST_PAUSE
        while not self._leaving.is_set():
            over = Over.LOST
            try:
                over = await self._meet()
            except Exception as error:  # noqa: BLE001  no server, no right to enter, a damaged file: try again
                self._tried = True
                self._started.set()
                self._told(f"{getattr(error, 'message', '') or repr(error)}; training goes on without torchLoom")
            else:
                pause = FIRST_PAUSE
            if over is Over.SILENCED:
                self._gone.set()
                await self._leaving.wait()  # who watches on this machine still sees it
            if over in {Over.SAID, Over.SILENCED}:
                return
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._leaving.wait(), pause * _chance.uniform(0.5, 1.0))
            pause = min(pause * 2, self._settings.reconnect_seconds)

    async def _meet(self) -> Over:
        """One connection, from finding the server to the end of the talk."""
        own = self.life.rank if self._names.launcher == LAUNCHER else None  # its credential is for this rank alone
        address = find(self._settings, Role.THREADLET, own)
        closed = asyncio.Event()
        client = await self._connect(address, closed)
        if client is None:
            return Over.SAID
        try:
            self._check_sockets()
            self.up = self._tried = True
            logger.info("torchLoom: the link to %s is %s", address, "back" if self._troubled else "up")
            self._troubled = False
            self.life.term = 0  # of the weaver that speaks on this connection; a stale one cannot any more
            talk = Conversation(
                client, self.life, self._meter, self._reader, self._hello, self._helm, self._orders, self.signs
            )
            talk.welcomed = self._started.set
            self._talk = talk
            over = await talk.hold(closed, self._leaving, self._how_it_ends)
            if over is Over.LOST:
                self._told(f"the link to {address} is lost; training goes on and it will be sought again")
            return over
        finally:
            self.up = False
            self._talk = None
            if self._leaving.is_set():
                self._gone.set()
            with contextlib.suppress(Exception):
                await asyncio.wait_for(client.close(), CLOSE_SECONDS)
            self._loop.hang_up()

    async def _connect(self, address: Address, closed: asyncio.Event) -> Client | None:
        """A connection; None if the process leaves meanwhile. A first attempt may use the goodbye's time."""

        async def failed(_: Exception) -> None:
            self._tried = True
            if self._leaving.is_set():
                self._gone.set()

        async def ended() -> None:
            closed.set()

        attempt = asyncio.ensure_future(
            connect(
                address,
                name=connection_name(self.life.rank, self.life.incarnation),
                on_error=failed,
                on_closed=ended,
            )
        )
        leaving = asyncio.ensure_future(self._leaving.wait())
        try:
            await asyncio.wait([attempt, leaving], return_when=asyncio.FIRST_COMPLETED)
            if not attempt.done() and not self._tried:
                await asyncio.wait([attempt], timeout=self._leave_by - time.monotonic())
            return attempt.result() if attempt.done() else None
        finally:
            self._tried = True
            leaving.cancel()
            if attempt.cancel():
                await asyncio.wait([attempt], timeout=JOIN_SECONDS)

    def _hello(self) -> Hello:
        return Hello(
            incarnation=self.life.incarnation,
            node=self._names.node,
            pid=os.getpid(),
            devices=self._devices or (),
            world_size=self._names.world_size,
            launcher=self._names.launcher,
            version=torchloom.__version__,
            step=self._meter.step_number,
            counted=self.counted,
            process=process_id(),
        )

    def _how_it_ends(self) -> tuple[Ending, float]:
        return self._ending, max(0.0, self._leave_by - time.monotonic())

    def _told(self, trouble: str) -> None:
        """One warning for an outage, however long it lasts."""
        if not self._troubled and not self._leaving.is_set():
            self._troubled = True
            logger.warning("torchLoom: %s", trouble)

    def _check_sockets(self) -> None:
        """The promise that forked children do not hold the connection rests on the loop knowing its socket."""
        if not self._loop.sockets:
            version = importlib.metadata.version("nats-py")
            logger.warning(
                "torchLoom: nats-py %s hides its socket; forked processes may delay the news of a death", version
            )


def _worth_telling(record: logging.LogRecord) -> bool:
    """Not what asyncio says on this thread whenever a server ends a TLS connection: nats-py's way of reading it."""
    return record.threadName != THREAD or "eof_received" not in str(record.msg)
