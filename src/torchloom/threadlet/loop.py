"""The event loop of the link thread: asyncio's own, which also knows its sockets and never holds up the exit.

A forked child (a DataLoader process) inherits the rank's socket and would hide the rank's death from the server for
as long as the child lives. So the loop remembers each socket it makes, and a child closes its copies. A fork waits for
the microseconds between the making and the remembering: a copy taken then would be of a socket nobody knows.
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
from typing import Any

_making = threading.Lock()
_forking = threading.local()


def before_fork() -> None:
    _forking.held = _making.acquire(timeout=1)


def after_fork() -> None:
    if getattr(_forking, "held", False):
        _forking.held = False
        _making.release()


class LinkLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        super().__init__()
        self._sockets: tuple[socket.socket, ...] = ()

    @property
    def sockets(self) -> tuple[socket.socket, ...]:
        """Those that are connected, or about to be."""
        return tuple(sock for sock in self._sockets if sock.fileno() >= 0)

    async def create_connection(self, protocol_factory: Any, host: Any = None, port: Any = None, **options: Any) -> Any:
        """As asyncio's, with sockets made here."""
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
            except OSError as error:
                sock.close()
                trouble = error
            except BaseException:
                sock.close()
                raise
            else:
                return sock
        raise trouble

    async def getaddrinfo(self, host: Any, port: Any, **options: Any) -> Any:
        """As asyncio's, but on a daemon thread: its pool is joined at exit, however long a name server takes."""
        with contextlib.suppress(socket.gaierror):  # an address in figures needs no thread
            return socket.getaddrinfo(host, port, **(options | {"flags": socket.AI_NUMERICHOST}))
        return await self.apart(lambda: socket.getaddrinfo(host, port, **options))

    async def apart(self, work: Callable[[], Any]) -> Any:
        """What `work` gives, however long it takes: on a thread of its own, for which no exit waits."""
        found: asyncio.Future[Any] = self.create_future()

        def settle(result: Any, error: Exception | None) -> None:
            if found.done():
                return
            if error is None:
                found.set_result(result)
            else:
                found.set_exception(error)

        def look() -> None:
            result, trouble = None, None
            try:
                result = work()
            except Exception as error:  # noqa: BLE001  handed to whoever waits
                trouble = error
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
                self.call_soon_threadsafe(settle, result, trouble)

        threading.Thread(target=look, name="torchloom-lookup", daemon=True).start()
        return await found

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """What goes wrong here is no business of the training's output."""
        logging.getLogger("torchloom").debug("torchLoom: %s", context.get("message"), exc_info=context.get("exception"))

    def hang_up(self) -> None:
        """End every connection at once. The peer sees it now, whatever a library still waits for."""
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

        Neither shutdown() nor a transport's close(): they would speak to the server on the parent's connection (TLS
        says goodbye). detach() first, so that no finaliser closes the number again once it belongs to another file.
        """
        for sock in self._sockets:
            with contextlib.suppress(OSError):
                fd = sock.detach()
                if fd >= 0:
                    os.close(fd)
