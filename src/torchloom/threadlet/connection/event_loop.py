"""The event loop of the link thread: asyncio's, extended to track its sockets and to never delay the exit.

A forked child (a DataLoader process) inherits the rank's socket and would hide the rank's death from the server for
as long as the child lives. The loop therefore records each socket it creates, and a child closes its copies. A fork
waits for the microseconds between creating and recording a socket: otherwise the child would inherit one unrecorded.
"""

from __future__ import annotations

import asyncio
import contextlib
import encodings.idna  # noqa: F401  looked up by name on the first connect; a fork during an import can hang the child
import logging
import os
import socket
import threading
from collections.abc import Callable
from concurrent.futures import Executor
from functools import partial
from typing import Any, TypeVar, TypeVarTuple

T = TypeVar("T")
Ts = TypeVarTuple("Ts")
_making = threading.RLock()  # only the thread that has acquired it can release it


def before_fork() -> None:
    _making.acquire(timeout=1)


def after_fork() -> None:
    with contextlib.suppress(RuntimeError):  # it was not acquired in time
        _making.release()


class LinkLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        super().__init__()
        self._sockets: tuple[socket.socket, ...] = ()

    @property
    def sockets(self) -> tuple[socket.socket, ...]:
        """The sockets that are connected or connecting."""
        return tuple(sock for sock in self._sockets if sock.fileno() >= 0)

    async def create_connection(self, protocol_factory: Any, host: Any = None, port: Any = None, **options: Any) -> Any:
        """As asyncio's, with sockets created here."""
        if host is not None:
            options["sock"] = await self._connected(host, port)
        return await super().create_connection(protocol_factory, **options)

    async def _connected(self, host: str, port: int) -> socket.socket:
        trouble: OSError = ConnectionError(f"{host} has no address")
        for family, kind, protocol, _, address in await self.getaddrinfo(host, port, type=socket.SOCK_STREAM):
            with _making:
                sock = socket.socket(family, kind, protocol)
                self._sockets = (*self.sockets, sock)
            try:
                sock.setblocking(False)
                await self.sock_connect(sock, address)
                return sock
            except BaseException as error:
                sock.close()
                if not isinstance(error, OSError):
                    raise
                trouble = error
        raise trouble

    def run_in_executor(self, _: Executor | None, func: Callable[[*Ts], T], *args: *Ts) -> asyncio.Future[T]:
        """As asyncio's, but on a daemon thread: asyncio's pool is joined at exit, however long a name server takes."""
        future: asyncio.Future[T] = self.create_future()

        def finish(settle: Callable[[], None]) -> None:
            if not future.cancelled():
                settle()

        def run() -> None:
            try:
                settle = partial(future.set_result, func(*args))
            except Exception as error:  # noqa: BLE001  raised where the result is awaited
                settle = partial(future.set_exception, error)
            with contextlib.suppress(RuntimeError):  # the loop is closed, so nothing awaits it
                self.call_soon_threadsafe(finish, settle)

        threading.Thread(target=run, name="torchloom-worker", daemon=True).start()
        return future

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """Keep errors of this loop out of the training's output."""
        logging.getLogger("torchloom").debug("torchLoom: %s", context.get("message"), exc_info=context.get("exception"))

    def hang_up(self) -> None:
        """End every connection at once, even if a library still waits on it."""
        for sock in self.sockets:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        super().close()
        for sock in self.sockets:
            with contextlib.suppress(OSError):
                sock.close()

    def forget_after_fork(self) -> None:
        """In a child: close the inherited copies, silently.

        Neither shutdown() nor a transport's close(): they would send data on the parent's connection (TLS's closing
        message). detach() first, so that no finaliser closes the number again once it belongs to another file.
        """
        for sock in self._sockets:
            with contextlib.suppress(OSError):
                fd = sock.detach()
                if fd >= 0:
                    os.close(fd)
