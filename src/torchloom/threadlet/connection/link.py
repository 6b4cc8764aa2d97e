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

from torchloom.bus.connection import Address, close_quietly, connect, connection_name, find
from torchloom.bus.tasks import set_within
from torchloom.protocol.rank import ChangeSpec, Reply
from torchloom.protocol.subjects import Role
from torchloom.settings import Settings
from torchloom.threadlet.changes.step_boundary import Port
from torchloom.threadlet.connection.event_loop import LinkLoop
from torchloom.threadlet.connection.outbox import News
from torchloom.threadlet.connection.rank_state import Membership, RankState
from torchloom.threadlet.connection.session import Session, SessionEnd
from torchloom.threadlet.metrics.liveness import TICK_SECONDS
from torchloom.threadlet.process.exit_reason import Ending
from torchloom.threadlet.process.hardware import find_devices
from torchloom.threadlet.process.identity import LAUNCHER

logger = logging.getLogger("torchloom")
FIRST_PAUSE = 0.05
JOIN_SECONDS = 0.1
_chance = SystemRandom()
THREAD = "torchloom-link"


class Link(Port):
    def __init__(self, state: RankState, settings: Settings) -> None:
        self.state = state
        self.up = False
        self._settings = settings
        self._session: Session | None = None
        self._loop = LinkLoop()
        self._thread = threading.Thread(target=self._run, name=THREAD, daemon=True)
        self._tried = False
        """The first attempt to connect has succeeded or failed."""
        self._troubled = False
        """There is an outage, and it was logged."""
        self._gone = threading.Event()

    # ── called by the training ───────────────────────────────────────────────────────────────────────────────────────

    def start(self) -> None:
        logging.getLogger("asyncio").addFilter(_is_worth_logging)  # adding it twice has no effect
        self._thread.start()
        self.state.boundary.port = self

    def reply(self, reply: Reply) -> None:
        self._run_soon(lambda session: session.tasks.start(session.reply(reply)))

    def resolve(self, change: ChangeSpec) -> None:
        self._run_soon(lambda session: session.tasks.start(session.resolve(change)))

    def announce_knobs(self) -> None:
        self._run_soon(lambda session: session.news.set())

    def tell(self, news: News) -> None:
        """Report to the weaver, now or when there is a connection again. From any thread."""
        if not self._gone.is_set():
            self.state.outbox.put(news)
            self._run_soon(lambda session: session.news.set())

    def join(self, member: Membership) -> None:
        """The rank belongs to a torchft replica: report it, and listen to its lighthouse."""
        self.state.member = member
        self._run_soon(lambda session: session.tasks.start(session.follow_replica()))

    def introduce(self) -> None:
        """Say hello again, because its content has changed."""
        self._run_soon(lambda session: session.introduce())

    def _run_soon(self, work: Callable[[Session], object]) -> None:
        """Call a function on the link thread with the current session, if there is one."""

        def begin() -> None:
            if self._session is not None:
                work(self._session)

        with contextlib.suppress(RuntimeError):  # the loop is closed: there is no link any more
            self._loop.call_soon_threadsafe(begin)

    def goodbye(self, ending: Ending) -> None:
        """Report the ending and wait briefly until the weaver knows it; do not wait if there is no server."""
        seconds = self._settings.goodbye_seconds
        self.state.ending, self.state.leave_by = ending, time.monotonic() + seconds
        try:
            self._loop.call_soon_threadsafe(self.state.leaving.set)
        except RuntimeError:  # the loop is closed: the thread has ended before
            return
        if self.up or not self._tried:
            self._gone.wait(seconds)
        # A daemon thread that is inside C code while the interpreter is finalised can crash the process.
        self._thread.join(JOIN_SECONDS)

    def disown(self) -> None:
        """In a forked child: the connection is the parent's, and so is the loop."""
        self.up = False
        self.state.liveness.disown()
        # The loop must never be finalised here: its epoll is shared, so unregistering would affect the parent.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self))
        self._loop.forget_after_fork()

    # ── the thread ───────────────────────────────────────────────────────────────────────────────────────────────────

    def _run(self) -> None:
        try:
            with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
                runner.run(self._connect_loop())
        except Exception as error:  # noqa: BLE001  the last door before the training
            logger.warning("torchLoom: the link ended with an error, training continues: %r", error)
        finally:
            self.up = False
            self._tried = True
            self.state.liveness.leave()  # it does not tick any more
            self._gone.set()
            self.state.started.set()

    def _tick(self) -> None:
        """Tick on the liveness page, with or without a connection, as long as the loop runs."""
        self._loop.call_later(TICK_SECONDS, self._tick)
        self.state.liveness.tick()

    async def _connect_loop(self) -> None:
        """Connect, run a session, and connect again."""
        self._loop.call_soon(self._tick)
        state, names = self.state, self.state.names
        if state.devices is None:  # on another thread, because a driver may be slow to answer
            visible = os.environ.get("CUDA_VISIBLE_DEVICES")
            devices = await self._loop.run_in_executor(None, find_devices, visible, names.local_rank, names.node)
            state.devices = state.devices or devices
        pause = FIRST_PAUSE
        while not self.state.leaving.is_set():
            over = SessionEnd.LOST
            try:
                over = await self._run_session()
            except Exception as error:  # noqa: BLE001  no server, no right to enter, a damaged file: try again
                self._tried = True
                self.state.started.set()
                self._warn_once(f"{getattr(error, 'message', '') or repr(error)}; training continues without torchLoom")
            else:
                pause = FIRST_PAUSE
            if over is SessionEnd.MUTED:
                self._gone.set()
                await self.state.leaving.wait()  # the agent on this machine still sees the rank's ticks
            if over in {SessionEnd.GOODBYE, SessionEnd.MUTED}:
                return
            await set_within(self.state.leaving, pause * _chance.uniform(0.5, 1.0))
            pause = min(pause * 2, self._settings.reconnect_seconds)

    async def _run_session(self) -> SessionEnd:
        """One connection, from finding the server to the end of the session."""
        names = self.state.names  # the credential of a rank that torchLoom started is for this rank alone
        address = find(self._settings, Role.THREADLET, names.rank if names.launcher == LAUNCHER else None)
        closed = asyncio.Event()
        client = await self._connect(address, closed)
        if client is None:
            return SessionEnd.GOODBYE
        try:
            if not self._loop.sockets:  # unknown to the loop, so forked children would keep the connection open
                version = importlib.metadata.version("nats-py")
                logger.warning("torchLoom: nats-py %s hides its socket: forked processes may hide a death", version)
            self.up = self._tried = True
            logger.info("torchLoom: the link to %s is %s", address, "back" if self._troubled else "up")
            self._troubled = False
            self.state.term = 0  # the next weaver may have a lower one; a replaced weaver cannot use this connection
            self._session = Session(client, self.state)
            over = await self._session.run(closed)
            if over is SessionEnd.LOST:
                self._warn_once(f"the link to {address} is lost; training continues while torchLoom reconnects")
            return over
        finally:
            self.up = False
            self._session = None
            if self.state.leaving.is_set():
                self._gone.set()
            await close_quietly(client)
            self._loop.hang_up()

    async def _connect(self, address: Address, closed: asyncio.Event) -> Client | None:
        """A connection; None if the process leaves first. A first attempt may use the time of the goodbye."""

        async def failed(_: Exception) -> None:
            self._tried = True
            if self.state.leaving.is_set():
                self._gone.set()

        async def ended() -> None:
            closed.set()

        name = connection_name(self.state.rank, self.state.incarnation)
        attempt = asyncio.ensure_future(connect(address, name=name, on_error=failed, on_closed=ended))
        leaving = asyncio.ensure_future(self.state.leaving.wait())
        try:
            await asyncio.wait([attempt, leaving], return_when=asyncio.FIRST_COMPLETED)
            if not attempt.done() and not self._tried:
                await asyncio.wait([attempt], timeout=self.state.leave_by - time.monotonic())
            return attempt.result() if attempt.done() else None
        finally:
            self._tried = True
            leaving.cancel()
            if attempt.cancel():
                await asyncio.wait([attempt], timeout=JOIN_SECONDS)

    def _warn_once(self, trouble: str) -> None:
        """Log one warning per outage."""
        if not self._troubled and not self.state.leaving.is_set():
            self._troubled = True
            logger.warning("torchLoom: %s", trouble)


def _is_worth_logging(record: logging.LogRecord) -> bool:
    """Filter out asyncio's warning on this thread when a server ends a TLS connection: nats-py causes it."""
    return record.threadName != THREAD or "eof_received" not in str(record.msg)
