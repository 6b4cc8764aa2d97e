"""Words as datagrams on a unix socket: whole or not at all, whatever their size and however long the path.

A word that may not fit into a datagram travels as an open file (SCM_RIGHTS) instead; the datagram is then just MARK.
A path too long for a sockaddr_un (108 bytes) is reached through the open folder: /proc/self/fd/N/supervisor.sock.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
from collections import deque
from pathlib import Path

from torchloom.agent.supervisor.protocol import FromSupervisor, encode

NAME = "supervisor.sock"
INLINE_BYTES = 60_000
MARK = b"@"
MAX_BYTES = 64 * 1024**2
"""More than a kernel lets a command and its environment have."""


def pair() -> tuple[socket.socket, socket.socket]:
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def listen_here() -> socket.socket:
    """In the current folder: so its path is always short enough. Only the owner may connect."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(NAME)  # noqa: PTH108
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(NAME)
    os.chmod(NAME, 0o600)  # noqa: PTH101
    listener.listen(8)
    listener.setblocking(False)
    return listener


def connect(folder: Path) -> socket.socket:
    """OSError (FileNotFoundError, ConnectionRefusedError) if nobody listens there."""
    client = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        path = folder / NAME
        if len(os.fsencode(path)) < 100:
            client.connect(str(path))
        else:
            through = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
            try:
                client.connect(f"/proc/self/fd/{through}/{NAME}")
            finally:
                os.close(through)
    except BaseException:
        client.close()
        raise
    return client


def send(to: socket.socket, data: bytes) -> None:
    """BlockingIOError if it must wait for the reader, and then nothing of it has been sent."""
    if len(data) <= INLINE_BYTES:
        to.send(data)
        return
    carrier = os.memfd_create("word", os.MFD_CLOEXEC)
    try:
        rest = memoryview(data)
        while rest:
            rest = rest[os.write(carrier, rest) :]
        socket.send_fds(to, [MARK], [carrier])
    finally:
        os.close(carrier)


def send_all(to: socket.socket, waiting: deque[bytes]) -> None:
    """As `send`; what was not sent stays in the queue."""
    while waiting:
        send(to, waiting[0])
        waiting.popleft()


def receive(source: socket.socket) -> bytes:
    """One word; empty when the other side is gone."""
    data, carriers, _, _ = socket.recv_fds(source, INLINE_BYTES + 1, 1)
    try:
        if data != MARK or not carriers:
            return data
        size = os.fstat(carriers[0]).st_size
        if size > MAX_BYTES:
            raise ValueError(f"a word of {size} bytes")
        return os.pread(carriers[0], size, 0)
    finally:
        for carrier in carriers:
            os.close(carrier)


MAX_WAITING = 10_000
"""Words for an agent that does not read; then it is given up. It will find all it missed in State."""
AT_ONCE = 64


class ClientConnection:
    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self.connection = connection
        self.fd = connection.fileno()
        self.outbox: deque[bytes] = deque()

    def interest(self) -> int:
        return select.POLLIN | (select.POLLOUT if self.outbox else 0)

    def tell(self, word: FromSupervisor) -> bool:
        """False if it is gone."""
        self.outbox.append(encode(word))
        return self.flush()

    def flush(self) -> bool:
        """Send what can be sent without waiting. False if it is gone."""
        try:
            send_all(self.connection, self.outbox)
        except BlockingIOError:
            return len(self.outbox) <= MAX_WAITING
        except OSError:
            return False
        return True

    def listen(self) -> tuple[list[bytes], bool]:
        """What it said, and whether it is still there."""
        said: list[bytes] = []
        try:
            while len(said) < AT_ONCE:
                data = receive(self.connection)
                if not data:
                    return said, False
                said.append(data)
        except BlockingIOError:
            return said, True
        except (OSError, ValueError):
            return said, False
        return said, True

    def close(self) -> None:
        self.connection.close()
