"""A TCP relay between a rank and its server, for what networks do."""

from __future__ import annotations

import asyncio
import socket


class Proxy:
    """Its connections can be reset like a network would, or fall silent from a word on."""

    def __init__(self, target: int) -> None:
        self.target = target
        self.port = 0
        self.last_words: tuple[bytes, ...] = ()
        """If set, whichever side has said one of these is not heard any more."""
        self.swallowed = b""
        """If set, what has this in it is lost on the way."""
        self._pairs: list[tuple[asyncio.StreamWriter, asyncio.StreamWriter]] = []
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Proxy:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        self.reset()
        for task in self._tasks:
            task.cancel()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, out = await asyncio.open_connection("127.0.0.1", self.target)
        self._pairs.append((writer, out))
        for source, sink in ((reader, out), (there, writer)):
            task = asyncio.create_task(self._relay(source, sink))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _relay(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        over = False
        try:
            while data := await source.read(65536):
                if not over and not (self.swallowed and self.swallowed in data):
                    sink.write(data)
                    await sink.drain()
                over = over or any(word in data for word in self.last_words)
        except OSError:
            pass
        finally:
            sink.close()

    def reset(self) -> None:
        for pair in self._pairs:
            for writer in pair:
                sock: socket.socket | None = writer.get_extra_info("socket")
                if sock is not None and sock.fileno() >= 0:
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\x00\x00\x00\x00\x00\x00\x00")
                writer.transport.abort()
        self._pairs.clear()
