"""The socket between an agent and a supervisor. Each message is a line of JSON; nothing here waits for the other side.

A path too long for a sockaddr_un (108 bytes) is reached through the open folder: /proc/self/fd/N/supervisor.sock.
"""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from pathlib import Path

from torchloom.agent.supervisor.protocol import SupervisorMessage, encode

NAME = "supervisor.sock"
CHUNK = 256 * 1024
MAX_BYTES = 64 * 1024**2
"""Of a message, or of those that wait: more than a kernel lets a command and its environment have."""


def listen_here() -> socket.socket:
    """In the current folder: so its path is always short enough. Only the owner may connect."""
    Path(NAME).unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(NAME)
    Path(NAME).chmod(0o600)
    listener.listen(8)
    listener.setblocking(False)
    return listener


def connect(folder: Path) -> socket.socket:
    """OSError (FileNotFoundError, ConnectionRefusedError) if nobody listens there."""
    through = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    client = socket.socket(socket.AF_UNIX)
    try:
        path = os.fsencode(folder / NAME)
        client.connect(path if len(path) < 100 else f"/proc/self/fd/{through}/{NAME}")
    except BaseException:
        client.close()
        raise
    finally:
        os.close(through)
    return client


class Connection:
    """One end of it."""

    def __init__(self, stream: socket.socket) -> None:
        stream.setblocking(False)
        self.stream = stream
        self.unsent = bytearray()
        self._unread = b""

    def send(self, *messages: SupervisorMessage) -> None:
        """Send what waits already, then these. What the other side has no room for waits. OSError if it is gone."""
        for message in messages:
            self.unsent += encode(message) + b"\n"
        with suppress(BlockingIOError):
            while self.unsent:
                del self.unsent[: self.stream.send(self.unsent)]

    def receive(self) -> tuple[list[bytes], bool]:
        """The messages that have arrived whole, and whether more may come."""
        try:
            data = self.stream.recv(CHUNK)
        except BlockingIOError:
            return [], True
        except OSError:
            data = b""
        *messages, self._unread = (self._unread + data).split(b"\n")
        return messages, bool(data) and len(self._unread) <= MAX_BYTES
