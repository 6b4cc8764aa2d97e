"""The thread that links a rank to NATS: connect, run a session, and when that ends, find the server and connect again.

A server that is not up yet, was restarted, moved to another port or refused an expired credential all take the same
path: the connection ends, the address is resolved again, and a new connection says hello. Nothing here raises into the
training or blocks it, except briefly for a goodbye.
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

from torchloom.bus.connection import Address, connect, find
from torchloom.bus.connection_names import connection_name
from torchloom.protocol.rank import ChangeSpec, Hello, Reply
from torchloom.protocol.subjects import Role
from torchloom.settings import Settings
from torchloom.shared.process_id import process_id
from torchloom.threadlet.changes.orders import Orders
from torchloom.threadlet.changes.step_boundary import Port, StepBoundary
from torchloom.threadlet.connection.event_loop import LinkLoop
from torchloom.threadlet.connection.outbox import News
from torchloom.threadlet.connection.rank_state import Membership, RankState
from torchloom.threadlet.connection.session import Session, SessionEnd
from torchloom.threadlet.metrics.liveness import TICK_SECONDS, LivenessPageWriter
from torchloom.threadlet.metrics.meter import Meter
from torchloom.threadlet.process.exit_reason import Ending
from torchloom.threadlet.process.hardware import find_devices
from torchloom.threadlet.process.identity import LAUNCHER, Names
from torchloom.version import __version__

logger = logging.getLogger("torchloom")
FIRST_PAUSE = 0.05
CLOSE_SECONDS = 1.0
JOIN_SECONDS = 0.1
_chance = SystemRandom()
THREAD = "torchloom-link"


class Link(Port):
    def __init__(
        self,
        names: Names,
        incarnation: str,
        meter: Meter,
        settings: Settings,
        devices: tuple[str, ...] | None,
        liveness: LivenessPageWriter,
    ) -> None:
        self.boundary = StepBoundary(incarnation, meter, settings, self)
        self.state = RankState(
            names.rank, incarnation, settings.beat_seconds, meter, self.boundary, Orders(self.boundary), liveness
        )
        self.up = False
        self._names = names
        self.liveness = liveness
        self._session: Session | None = None
        self._settings = settings
        self._devices = devices
        self.counted = False
        """The script has not attached."""
        self._loop = LinkLoop()
        self._thread = threading.Thread(target=self._run, name=THREAD, daemon=True)
        self._tried = False
        """The first attempt to connect has succeeded or failed."""
        self._troubled = False
        """There is an outage, and it was logged."""
        self._leaving = asyncio.Event()
        self._leave_by = 0.0
        self._ending = Ending()
        self._gone = threading.Event()
        self._started = threading.Event()
        """Welcomed, or there is no server."""

    # ── called by the training ───────────────────────────────────────────────────────────────────────────────────────

    def start(self) -> None:
        logging.getLogger("asyncio").addFilter(_is_worth_logging)  # adding it twice has no effect
        self._thread.start()

    def await_welcome(self) -> None:
        """Wait briefly for the current knob values, so that the first step has them; not if there is no server."""
        self._started.wait(self._settings.welcome_seconds)

    def reply(self, reply: Reply) -> None:
        self._run_soon(lambda session: session.spawn(session.reply(reply)))

    def resolve(self, change: ChangeSpec) -> None:
        self._run_soon(lambda session: session.spawn(session.resolve(change)))

    def announce_knobs(self) -> None:
        self._run_soon(lambda session: session.more.set())

    def tell(self, news: News) -> None:
        """Report to the weaver, now or when there is a connection again. From any thread."""
        if not self._gone.is_set():
            self.state.outbox.put(news)
            self._run_soon(lambda session: session.news.set())

    def join(self, member: Membership) -> None:
        """The rank belongs to a torchft replica: report it, and listen to its lighthouse."""
        self.state.member = member
        self._run_soon(lambda session: session.spawn(session.follow_replica()))

    def set_devices(self, devices: tuple[str, ...] | None) -> None:
        """Use the devices that the script names; None keeps those that were found."""
        self._devices = devices or self._devices

    def introduce(self) -> None:
        """Say hello again, because its content has changed."""
        self._run_soon(lambda session: session.reintroduce())

    def _run_soon(self, work: Callable[[Session], None]) -> None:
        """Call a function on the link thread with the current session, if there is one."""

        def begin() -> None:
            if self._session is not None:
                work(self._session)

        with contextlib.suppress(RuntimeError):  # the loop is closed: there is no link any more
            self._loop.call_soon_threadsafe(begin)

    def goodbye(self, ending: Ending) -> None:
        """Report the ending and wait briefly until the weaver knows it; do not wait if there is no server."""
        seconds = self._settings.goodbye_seconds
        self._ending, self._leave_by = ending, time.monotonic() + seconds
        try:
            self._loop.call_soon_threadsafe(self._leaving.set)
        except RuntimeError:  # the loop is closed: the thread has ended before
            return
        if self.up or not self._tried:
            self._gone.wait(seconds)
        # A daemon thread that is inside C code while the interpreter is finalised can crash the process.
        self._thread.join(JOIN_SECONDS)

    def disown(self) -> None:
        """In a forked child: the connection is the parent's, and so is the loop."""
        self.up = False
        self.liveness.disown()
        # The loop must never be finalised here: its epoll is shared, so unregistering would affect the parent.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self))
        self._loop.forget_after_fork()

    # ── the thread ───────────────────────────────────────────────────────────────────────────────────────────────────

    def _run(self) -> None:
        try:
            with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
                runner.run(self._main())
        except Exception as error:  # noqa: BLE001  the last door before the training
            logger.warning("torchLoom: the link ended with an error, training continues: %r", error)
        finally:
            self.up = False
            self._tried = True
            self.liveness.phases.leave()  # it does not tick any more
            self.state.reader.close()
            self._gone.set()
            self._started.set()

    async def _tick_loop(self) -> None:
        """Tick on the liveness page, with or without a connection."""
        while True:
            self.liveness.tick()
            await asyncio.sleep(TICK_SECONDS)

    async def _main(self) -> None:
        ticking = asyncio.ensure_future(self._tick_loop())
        try:
            await self._connect_loop()
        finally:
            ticking.cancel()

    async def _connect_loop(self) -> None:
        """Connect, run a session, and connect again."""
        if self._devices is None:  # on another thread, because a driver may be slow to answer
            visible, local, node = os.environ.get("CUDA_VISIBLE_DEVICES"), self._names.local_rank, self._names.node
            devices = await self._loop.run_in_thread(lambda: find_devices(visible, local, node))
            self._devices = self._devices or devices
        pause = FIRST_PAUSE
        while not self._leaving.is_set():
            over = SessionEnd.LOST
            try:
                over = await self._run_session()
            except Exception as error:  # noqa: BLE001  no server, no right to enter, a damaged file: try again
                self._tried = True
                self._started.set()
                self._warn_once(f"{getattr(error, 'message', '') or repr(error)}; training continues without torchLoom")
            else:
                pause = FIRST_PAUSE
            if over is SessionEnd.MUTED:
                self._gone.set()
                await self._leaving.wait()  # the agent on this machine still sees the rank's ticks
            if over in {SessionEnd.GOODBYE, SessionEnd.MUTED}:
                return
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._leaving.wait(), pause * _chance.uniform(0.5, 1.0))
            pause = min(pause * 2, self._settings.reconnect_seconds)

    async def _run_session(self) -> SessionEnd:
        """One connection, from finding the server to the end of the session."""
        own = self.state.rank if self._names.launcher == LAUNCHER else None  # its credential is for this rank alone
        address = find(self._settings, Role.THREADLET, own)
        closed = asyncio.Event()
        client = await self._connect(address, closed)
        if client is None:
            return SessionEnd.GOODBYE
        try:
            self._check_sockets()
            self.up = self._tried = True
            logger.info("torchLoom: the link to %s is %s", address, "back" if self._troubled else "up")
            self._troubled = False
            self.state.term = 0  # the next weaver may have a lower one; a replaced weaver cannot use this connection
            self._session = Session(client, self.state, self._hello, self._started.set)
            over = await self._session.run(closed, self._leaving, self._how_it_ends)
            if over is SessionEnd.LOST:
                self._warn_once(f"the link to {address} is lost; training continues while torchLoom reconnects")
            return over
        finally:
            self.up = False
            self._session = None
            if self._leaving.is_set():
                self._gone.set()
            with contextlib.suppress(Exception):
                await asyncio.wait_for(client.close(), CLOSE_SECONDS)
            self._loop.hang_up()

    async def _connect(self, address: Address, closed: asyncio.Event) -> Client | None:
        """A connection; None if the process leaves first. A first attempt may use the time of the goodbye."""

        async def failed(_: Exception) -> None:
            self._tried = True
            if self._leaving.is_set():
                self._gone.set()

        async def ended() -> None:
            closed.set()

        attempt = asyncio.ensure_future(
            connect(
                address,
                name=connection_name(self.state.rank, self.state.incarnation),
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
            incarnation=self.state.incarnation,
            node=self._names.node,
            pid=os.getpid(),
            devices=self._devices or (),
            world_size=self._names.world_size,
            launcher=self._names.launcher,
            version=__version__,
            step=self.state.meter.step_number,
            counted=self.counted,
            process=process_id(),
        )

    def _how_it_ends(self) -> tuple[Ending, float]:
        return self._ending, max(0.0, self._leave_by - time.monotonic())

    def _warn_once(self, trouble: str) -> None:
        """Log one warning per outage."""
        if not self._troubled and not self._leaving.is_set():
            self._troubled = True
            logger.warning("torchLoom: %s", trouble)

    def _check_sockets(self) -> None:
        """Check that the loop knows its socket: otherwise forked children would keep the connection open."""
        if not self._loop.sockets:
            version = importlib.metadata.version("nats-py")
            logger.warning("torchLoom: nats-py %s hides its socket: forked processes may hide a death", version)


def _is_worth_logging(record: logging.LogRecord) -> bool:
    """Filter out asyncio's warning on this thread when a server ends a TLS connection: nats-py causes it."""
    return record.threadName != THREAD or "eof_received" not in str(record.msg)
