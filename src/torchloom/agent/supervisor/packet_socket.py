"""A connection of datagrams in an event loop: what is said waits its turn, what is heard is passed on at once."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections import deque
from collections.abc import Callable

from torchloom.agent.supervisor import framing


class PacketSocket:
    def __init__(self, connection: socket.socket, heard: Callable[[bytes], None], lost: Callable[[], None]) -> None:
        """`lost` is called once, after the last that was heard, unless it was closed here."""
        self._connection = connection
        self._heard = heard
        self._lost = lost
        self._outbox: deque[bytes] = deque()
        self._loop = asyncio.get_running_loop()
        self._open = True
        connection.setblocking(False)
        self._loop.add_reader(connection, self._read)

    def say(self, data: bytes) -> None:
        self._outbox.append(data)
        self._write()

    def close(self) -> None:
        if self._open:
            self._open = False
            self._loop.remove_reader(self._connection)
            self._loop.remove_writer(self._connection)
            self._connection.close()

    def _write(self) -> None:
        try:
            while self._outbox:
                framing.send(self._connection, self._outbox[0])
                self._outbox.popleft()
            self._loop.remove_writer(self._connection)
        except BlockingIOError:
            self._loop.add_writer(self._connection, self._write)
        except OSError:  # what it said before it was lost is still to be read, and then the end
            self._outbox.clear()
            self._loop.remove_writer(self._connection)

    def _read(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while self._open:
                try:
                    data = framing.receive(self._connection)
                except ConnectionError:
                    data = b""
                if data:
                    self._heard(data)
                else:
                    self.close()
                    self._lost()
