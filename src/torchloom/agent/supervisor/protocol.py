"""What an agent and a supervisor say to each other: frozen, tagged, one line of JSON each. And the socket between them.

agent  → supervisor   Begin Signal Forget Look Leave
supervisor → agent    State            to the agent that starts it at once, when preloading is over, and when asked
                  Begun NotBegun   the answer to Begin
                  Ended            by itself, once, after it has been written to the folder
                  Replaced         another agent is served; the one that reads this closes the connection

An agent that finds a supervisor asks with Look: its first message makes it the one that is served.
A path too long for a sockaddr_un (108 bytes) is reached through the open folder: /proc/self/fd/N/supervisor.sock.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from torchloom.protocol.phrase import Prose
from torchloom.shared.json_decoding import decoder

ALREADY = 5
"""Exit code where another supervisor has the folder."""
START = "import sys; sys.flags.safe_path or sys.path.pop(0); from torchloom.agent.supervisor.main import main; main()"
"""For `python -c`: like the interpreters of the ranks it has no flags, not even -P, and still nothing in the working
folder is imported by mistake."""
SOCKET = "supervisor.sock"
CHUNK = 256 * 1024
MAX_BYTES = 64 * 1024**2
"""Of a message, or of those that wait: more than a kernel lets a command and its environment have."""

Key = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_:-]{1,200}$")]
"""Names one life of one rank; a new life takes a new key. It is a file name too."""
Word = Annotated[str, Meta(pattern=r"^[^\x00]*$")]
"""What execve can carry."""
Command = Annotated[tuple[Word, ...], Meta(min_length=1)]


class SupervisorMessage(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag=True, tag_field="is"):
    """Base of everything said; the class name is its tag."""


# ── agent → supervisor ──


class Begin(SupervisorMessage, frozen=True):
    """Start a rank. A key is started once: asked again, the answer is NotBegun."""

    key: Key
    argv: Command
    """The whole command. Only `PYTHON SCRIPT ...` and `PYTHON -m MODULE ...` can be warm."""
    env: dict[Annotated[str, Meta(pattern=r"^[^=\x00]+$")], Word]
    """All of it: nothing of the supervisor's own environment is added."""
    cwd: Word
    stdout: Word
    """Absolute path; appended to. It may be the same as stderr."""
    stderr: Word
    warm: bool = True
    """Fork it from the supervisor if that gives what a fresh interpreter would. False: always a fresh one."""


class Signal(SupervisorMessage, frozen=True):
    """To the rank and all of its process group.

    Nothing happens, and nothing is answered, where the rank has ended or was never started.
    """

    key: Key
    number: Annotated[int, Meta(ge=1, le=64)]


class Forget(SupervisorMessage, frozen=True):
    """The end of this rank has been taken note of. One that still runs is not forgotten."""

    key: Key


class Look(SupervisorMessage, frozen=True):
    """Answered with State."""


class Leave(SupervisorMessage, frozen=True):
    """Kill all ranks, and end."""


# ── supervisor → agent ──


class Begun(SupervisorMessage, frozen=True):
    key: Key
    pid: int
    """Of the rank; the number of its session and process group as well."""
    at: float
    warm: bool = False
    why_cold: Prose = ""
    """Why it is a fresh interpreter although a warm start was asked for."""


class NotBegun(SupervisorMessage, frozen=True):
    key: Key
    why: Prose


class Ended(SupervisorMessage, frozen=True):
    key: Key
    at: float
    code: int | None = None
    """Exit code; None if a signal ended it."""
    signal: int | None = None
    core_dumped: bool = False
    oom_kills: int = 0
    """Processes in the rank's cgroup that the kernel killed because memory was short, while the rank lived."""
    lost: bool = False
    """The supervisor was killed, and the rank with it: how it ended is not known from the kernel."""


class RankRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A rank that was started and not yet forgotten."""

    begun: Begun
    ended: Ended | None = None


class State(SupervisorMessage, frozen=True):
    pid: int
    """Of the supervisor."""
    kept: tuple[RankRecord, ...] = ()
    preloading: bool = False
    """Warm starts asked for now will wait until it is over."""
    why_cold: Prose = ""
    """Why every start will be cold; empty if they can be warm."""
    memory_mb: float = 0.0
    """Proportional share: what is shared with living ranks is divided among them."""


class Replaced(SupervisorMessage, frozen=True):
    pass


FromAgent = Begin | Signal | Forget | Look | Leave
FromSupervisor = State | Begun | NotBegun | Ended | Replaced

encode = msgspec.json.Encoder().encode
from_agent: Callable[[bytes], FromAgent] = decoder(FromAgent)
from_supervisor: Callable[[bytes], FromSupervisor] = decoder(FromSupervisor)


# ── the socket ──


def listen_here() -> socket.socket:
    """In the current folder: so its path is always short enough. Only the owner may connect."""
    Path(SOCKET).unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(SOCKET)
    Path(SOCKET).chmod(0o600)
    listener.listen(8)
    listener.setblocking(False)
    return listener


def connect(folder: Path) -> socket.socket:
    """OSError (FileNotFoundError, ConnectionRefusedError) if nobody listens there."""
    through = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    client = socket.socket(socket.AF_UNIX)
    try:
        path = os.fsencode(folder / SOCKET)
        client.connect(path if len(path) < 100 else f"/proc/self/fd/{through}/{SOCKET}")
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
        self.spoke = False
        """Whether the supervisor has understood a message from it."""
        self.unsent = bytearray()
        self._unread = bytearray()

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
        messages = []
        rest, *lines = data.split(b"\n")  # what was read before is not searched again: a message may have many parts
        self._unread += rest
        for line in lines:
            messages.append(bytes(self._unread))
            self._unread = bytearray(line)
        return messages, bool(data) and len(self._unread) <= MAX_BYTES
