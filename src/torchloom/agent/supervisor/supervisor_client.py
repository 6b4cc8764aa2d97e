"""The agent's end of the connection with a supervisor: start or find one, start ranks, learn how they end.

    how = SupervisorOptions(tied=True)
    link = await SupervisorClient.start(folder, how=how, ended=inbox.put_nowait, gone=inbox.put_nowait)
    answer = await link.begin(Begin(key="job:replica:0:1", argv=(sys.executable, "train.py"), ...))

`ended` is called for every rank that ends, and on `find` for those that ended earlier and were not forgotten: so two
clients may both receive a key. `gone` is called once if the supervisor dies or serves another agent; never after
`close`. Both are called from the event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from torchloom.agent.monitor.exit_evidence import last_lines, signal_name
from torchloom.agent.supervisor import transport
from torchloom.agent.supervisor.protocol import (
    ALREADY,
    START,
    Begin,
    Begun,
    Ended,
    Forget,
    FromAgent,
    Leave,
    Look,
    NotBegun,
    Replaced,
    Signal,
    State,
    encode,
    from_supervisor,
)
from torchloom.agent.supervisor.protocol import check as check_word
from torchloom.agent.supervisor.transport import receive, send_all
from torchloom.errors import AlreadyUp, BadInput, TorchLoomError, Unreachable
from torchloom.protocol.phrase import Phrase, Prose, phrase
from torchloom.views.wording.phrases import render

LOG = "supervisor.log"


@dataclass(frozen=True)
class SupervisorOptions:
    """How to start a supervisor. Warm ranks need its interpreter, flags and environment to be theirs."""

    tied: bool = False
    """It dies with this process (or rather with the thread that starts it). Otherwise it stays when we die."""
    preload: tuple[str, ...] = ()
    """Modules to import ahead: torch, and torch._dynamo, which making an optimizer imports."""
    python: str = sys.executable
    flags: tuple[str, ...] = ()
    """Of the interpreter, each a word of its own: -u, -O, -X, dev."""
    env: Mapping[str, str] | None = None
    """None: this process's."""
    cwd: str | None = None


def spawn(folder: Path, how: SupervisorOptions) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Start it, and give it one end of a connection: it is never too early to talk to it.

    In this very thread: a tied supervisor dies with the thread that started it.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    ours, theirs = transport.pair()
    command = [how.python, *how.flags, "-c", START, str(folder), "--client", str(theirs.fileno())]
    command += ["--preload", ",".join(how.preload)] if how.preload else []
    command += ["--tied", str(os.getpid())] if how.tied else []
    try:
        with theirs, (folder / LOG).open("ab") as log:
            process = subprocess.Popen(
                command, cwd=how.cwd, env=None if how.env is None else dict(how.env), pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip
    except OSError as error:
        ours.close()
        raise BadInput(f"cannot start a supervisor with {how.python} in {how.cwd or '.'}: {error.strerror}") from error
    return process, ours


__all__ = ["Gone", "SupervisorClient", "SupervisorGone", "SupervisorOptions"]


@dataclass(frozen=True)
class Gone:
    """The supervisor is dead, and so are its ranks; or it is alive and serves another agent."""

    why: Phrase
    keys: tuple[str, ...]
    """The ranks that were running, as far as this link knew."""
    replaced: bool = False


class SupervisorGone(TorchLoomError):
    """The supervisor died before it answered. A rank that was being started is dead too."""

    def __init__(self, folder: Path, gone: Gone) -> None:
        self.why = phrase("supervisor_gone", folder=str(folder), why=gone.why)
        super().__init__(render(self.why))


@dataclass(eq=False)
class SupervisorClient:
    folder: Path
    connection: socket.socket
    ended: Callable[[Ended], None]
    gone: Callable[[Gone], None]
    process: subprocess.Popen[bytes] | None = None
    """The supervisor, if it was started here."""
    tied: bool = False
    state: State = field(default_factory=lambda: State(pid=0))
    """As last told; `running` is always up to date."""
    running: dict[str, int] = field(default_factory=dict)
    """The process number of each rank."""
    _line: PacketSocket = field(init=False)
    _starts: dict[str, asyncio.Future[Begun | NotBegun]] = field(default_factory=dict)
    _looks: list[asyncio.Future[State]] = field(default_factory=list)
    _over: Gone | None = None

    # ── beginning and ending ─────────────────────────────────────────────────────────────────────────────────────────

    @classmethod
    async def start(
        cls, folder: Path, how: SupervisorOptions, ended: Callable[[Ended], None], gone: Callable[[Gone], None]
    ) -> SupervisorClient:
        """Start a supervisor in this folder and wait for its first message. It continues to preload after that."""
        folder = folder.absolute()
        process, ours = spawn(folder, how)
        link = cls(folder, ours, ended, gone, process, how.tied)
        try:
            return await link._open()
        except SupervisorGone:
            code = await asyncio.to_thread(process.wait)
            if code == ALREADY:
                raise AlreadyUp(f"another supervisor has {folder}") from None
            last = " ".join(last_lines(folder / LOG, 1))
            raise TorchLoomError(f"the supervisor did not start (exit code {code}): {last}") from None
        except BaseException:  # not wanted any more: nobody would know of it
            process.kill()
            process.wait()
            raise

    @classmethod
    async def find(cls, folder: Path, ended: Callable[[Ended], None], gone: Callable[[Gone], None]) -> SupervisorClient:
        """Connect to the supervisor in this folder; it drops the agent it serves now. Unreachable if none is there."""
        folder = folder.absolute()
        try:
            connection = transport.connect(folder)
        except OSError as error:
            raise Unreachable(f"no supervisor in {folder}: {error.strerror}") from error
        return await cls(folder, connection, ended, gone)._open()

    async def close(self) -> None:
        """Stop talking. A standing supervisor stays, and so do its ranks; a tied one is asked to end."""
        if self.tied and not self._over:
            await self.dismiss()
            return
        self._finish(Gone(phrase("supervisor_closed"), ()), tell=False)

    async def dismiss(self) -> None:
        """Ask the supervisor to kill all ranks and to end; returns when it has."""
        if self._over is None:
            self._say(Leave())
            over: asyncio.Future[Gone] = asyncio.get_running_loop().create_future()
            self.gone = lambda gone: None if over.done() else over.set_result(gone)
            await over
        if self.process:
            await asyncio.to_thread(self.process.wait)

    @property
    def alive(self) -> bool:
        return self._over is None

    # ── asking ───────────────────────────────────────────────────────────────────────────────────────────────────────

    async def begin(self, begin: Begin) -> Begun | NotBegun:
        """Returns when the rank runs, or could not be started. A warm rank waits for the end of preloading."""
        try:
            check_word(begin)
        except (msgspec.ValidationError, UnicodeEncodeError) as error:
            raise BadInput(f"cannot start {begin.key!r}: {error}") from error
        if begin.key in self._starts:
            raise BadInput(f"{begin.key} is being started already")
        answer: asyncio.Future[Begun | NotBegun] = asyncio.get_running_loop().create_future()
        self._starts[begin.key] = answer
        try:
            self._say(begin)
            return await answer
        finally:
            self._starts.pop(begin.key, None)

    async def look(self) -> State:
        answer: asyncio.Future[State] = asyncio.get_running_loop().create_future()
        self._looks.append(answer)
        self._say(Look())
        return await answer

    async def settled(self) -> State:
        """When preloading is over: whether ranks can be warm."""
        while self.state.preloading:
            await self.look()  # answered between two modules at the earliest
        return self.state

    def signal(self, key: str, number: int, whole: bool = True) -> None:
        """To the rank and its process group, or to the rank alone. Nothing happens if it has ended."""
        self._say(Signal(key=key, number=int(number), whole=whole))

    def forget(self, key: str) -> None:
        """Its end has been taken note of."""
        self._say(Forget(key=key))

    # ── the connection ───────────────────────────────────────────────────────────────────────────────────────────────

    async def _open(self) -> SupervisorClient:
        self._line = PacketSocket(self.connection, self._hear, lambda: self._finish(self._obituary(), tell=True))
        first: asyncio.Future[State] = asyncio.get_running_loop().create_future()
        self._looks.append(first)
        told, self.gone = self.gone, lambda _: None  # a failure to start is an exception, not news
        try:
            await first
        except BaseException:
            self._finish(Gone(phrase("supervisor_closed"), ()), tell=False)
            raise
        self.gone = told
        return self

    def _say(self, word: FromAgent) -> None:
        if self._over:
            raise SupervisorGone(self.folder, self._over)
        self._line.say(encode(word))

    def _hear(self, data: bytes) -> None:
        match from_supervisor(data):
            case State() as state:
                known = self.state.pid != 0
                self.state = state
                self.running = {kept.begun.key: kept.begun.pid for kept in state.kept if kept.ended is None}
                for look in self._looks:
                    if not look.done():
                        look.set_result(state)
                self._looks.clear()
                for kept in state.kept if not known else ():
                    if kept.ended is not None:
                        self.ended(kept.ended)
            case Begun() as begun:
                self.running[begun.key] = begun.pid
                self._answer(begun)
            case NotBegun() as refusal:
                self._answer(refusal)
            case Ended() as ended:
                self.running.pop(ended.key, None)
                self.ended(ended)
            case Replaced():
                self._finish(Gone(phrase("supervisor_replaced"), tuple(self.running), True), tell=True)

    def _answer(self, answer: Begun | NotBegun) -> None:
        start = self._starts.pop(answer.key, None)
        if start and not start.done():
            start.set_result(answer)

    def _obituary(self) -> Gone:
        how: Prose = ""
        if self.process and (code := self.process.poll()) is not None:
            how = phrase("killed_by", signal=signal_name(-code)) if code < 0 else phrase("exit_code", status=code)
        return Gone(phrase("supervisor_dead", pid=self.state.pid, how=how), tuple(self.running))

    def _finish(self, gone: Gone, tell: bool) -> None:
        if self._over:
            return
        self._over = gone
        self._line.close()
        error = SupervisorGone(self.folder, gone)
        everyone: list[asyncio.Future[Any]] = [*self._starts.values(), *self._looks]
        for waiting in everyone:
            if not waiting.done():
                waiting.set_exception(error)
        self._starts.clear()
        self._looks.clear()
        if tell:
            self.gone(gone)


class PacketSocket:
    """The agent's end of the connection. The supervisor itself does not import asyncio."""

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
            send_all(self._connection, self._outbox)
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
                    data = receive(self._connection)
                except ConnectionError:
                    data = b""
                if data:
                    self._heard(data)
                else:
                    self.close()
                    self._lost()
