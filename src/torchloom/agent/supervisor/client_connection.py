"""The agent that is connected to a keeper, seen from the keeper: it may be slow, silent or gone, and nobody waits."""

from __future__ import annotations

import select
import socket
from collections import deque

from torchloom.agent.supervisor import framing
from torchloom.agent.supervisor.protocol import FromKeeper, encode

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

    def tell(self, word: FromKeeper) -> bool:
        """False if it is gone."""
        self.outbox.append(encode(word))
        return self.flush()

    def flush(self) -> bool:
        """Send what can be sent without waiting. False if it is gone."""
        try:
            while self.outbox:
                framing.send(self.connection, self.outbox[0])
                self.outbox.popleft()
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
                data = framing.receive(self.connection)
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
