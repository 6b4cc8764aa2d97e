"""The agent's end of the connection with a supervisor: start or find one, start ranks, learn how they end.

link = await SupervisorClient.start(folder, SupervisorOptions(tied=True), owner)
answer = await link.begin(Begin(key="job:replica:0:1", argv=(sys.executable, "train.py"), ...))
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, TypeVar

import msgspec

from torchloom.agent.monitor.exit_evidence import describe_exit, last_lines
from torchloom.agent.supervisor import protocol
from torchloom.agent.supervisor.protocol import Begin, Begun, Ended, NotBegun, State
from torchloom.errors import AlreadyUp, BadInput, TorchLoomError, Unreachable
from torchloom.protocol.phrase import Phrase, phrase
from torchloom.views.wording.phrases import render

logger = logging.getLogger("torchloom.agent")
LOG = "supervisor.log"
T = TypeVar("T")


@dataclass(frozen=True)
class SupervisorOptions:
    """How to start a supervisor. Warm ranks need its interpreter and environment to be theirs."""

    tied: bool = False
    """It dies with this process (or rather with the thread that starts it). Otherwise it stays when we die."""
    preload: tuple[str, ...] = ()
    """Modules to import ahead: torch, and torch._dynamo, which making an optimizer imports."""
    python: str = sys.executable
    env: Mapping[str, str] | None = None
    """None: this process's."""
    cwd: str | None = None


def spawn(folder: Path, how: SupervisorOptions) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Start it, and give it one end of a connection: it is never too early to talk to it.

    In this very thread: a tied supervisor dies with the thread that started it.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    ours, theirs = socket.socketpair()
    command = [how.python, "-c", protocol.START, str(folder), "--client", str(theirs.fileno())]
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


@dataclass(frozen=True)
class Gone:
    """The supervisor is dead, and so are its ranks; or it is alive and serves another agent."""

    why: Phrase
    replaced: bool = False


class SupervisorGone(TorchLoomError):
    """The supervisor died before it answered, and a rank that was being started with it; or it serves another agent."""

    def __init__(self, folder: Path, gone: Gone) -> None:
        self.replaced = gone.replaced
        self.why = phrase("supervisor_gone", folder=str(folder), why=gone.why)
        super().__init__(render(self.why))


class SupervisorOwner(Protocol):
    """Learns what a supervisor reports. Called from the event loop."""

    def rank_ended(self, ended: Ended) -> None:
        """For every rank that ends, and on `find` for those that ended earlier and were not forgotten: so two owners
        may both receive a key.
        """

    def supervisor_gone(self, link: SupervisorClient, gone: Gone) -> None:
        """Once, if the supervisor dies or serves another agent; never after `close` or `dismiss`."""


@dataclass(eq=False)
class SupervisorClient:
    folder: Path
    connection: protocol.Connection
    owner: SupervisorOwner | None
    process: subprocess.Popen[bytes] | None = None
    """The supervisor, if it was started here."""
    state: State = field(default_factory=lambda: State(pid=0))
    """As last reported; without a process id until it has been."""
    _dismissed: bool = False
    _starts: dict[str, asyncio.Future[Begun | NotBegun]] = field(default_factory=dict)
    _looks: list[asyncio.Future[State]] = field(default_factory=list)
    _over: asyncio.Future[Gone] = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    # ── beginning and ending ─────────────────────────────────────────────────────────────────────────────────────────

    @classmethod
    async def start(cls, folder: Path, how: SupervisorOptions, owner: SupervisorOwner) -> SupervisorClient:
        """Start a supervisor in this folder and wait for its first message. It continues to preload after that."""
        folder = folder.absolute()
        process, ours = spawn(folder, how)
        link = cls(folder, protocol.Connection(ours), owner, process)
        try:
            return await link._open()
        except SupervisorGone:
            code = await asyncio.to_thread(process.wait)
            if code == protocol.ALREADY:
                raise AlreadyUp(f"another supervisor has {folder}") from None
            last = " ".join(last_lines(folder / LOG, 1))
            raise TorchLoomError(f"the supervisor did not start (exit code {code}): {last}") from None
        except BaseException:  # not wanted any more: nobody would know of it
            process.kill()
            process.wait()
            raise

    @classmethod
    async def find(cls, folder: Path, owner: SupervisorOwner | None) -> SupervisorClient:
        """Connect to the supervisor in this folder; it drops the agent it serves now, unless that one is tied to it.
        Unreachable if none is there."""
        folder = folder.absolute()
        try:
            stream = protocol.connect(folder)
        except OSError as error:
            raise Unreachable(f"no supervisor in {folder}: {error.strerror}") from error
        link = cls(folder, protocol.Connection(stream), owner)
        link._send(protocol.Look())
        return await link._open()

    def close(self) -> None:
        """Stop talking. The supervisor stays, and so do its ranks."""
        self.owner = None
        self._finish(Gone(phrase("supervisor_closed")))

    async def dismiss(self) -> None:
        """Ask the supervisor to kill all ranks and to end; returns when it has."""
        if self.alive:
            self._dismissed = True
            self._send(protocol.Leave())
            await asyncio.wait((self._over,))
        if self.process:
            await asyncio.to_thread(self.process.wait)

    async def remove(self) -> None:
        """Dismiss the supervisor, and remove its folder."""
        await self.dismiss()
        shutil.rmtree(self.folder, ignore_errors=True)

    @property
    def alive(self) -> bool:
        return not self._over.done()

    # ── asking ───────────────────────────────────────────────────────────────────────────────────────────────────────

    async def begin(self, begin: Begin) -> Begun | NotBegun:
        """Returns when the rank runs, or could not be started. A warm rank waits for the end of preloading."""
        try:
            protocol.from_agent(protocol.encode(begin))  # as the supervisor will
        except (msgspec.MsgspecError, UnicodeEncodeError) as error:
            raise BadInput(f"cannot start {begin.key!r}: {error}") from error
        if begin.key in self._starts:
            raise BadInput(f"{begin.key} is being started already")
        answer: asyncio.Future[Begun | NotBegun] = asyncio.get_running_loop().create_future()
        self._starts[begin.key] = answer
        try:
            self._send(begin)
            return await self._answer(answer)
        finally:
            self._starts.pop(begin.key, None)

    async def look(self) -> State:
        self._send(protocol.Look())
        return await self._next_state()

    async def settled(self) -> State:
        """When preloading is over: whether ranks can be warm."""
        while self.state.preloading:
            await self.look()  # answered between two modules at the earliest
        return self.state

    def signal(self, key: str, number: int) -> None:
        """To the rank and its process group. Nothing happens if it has ended."""
        self._send(protocol.Signal(key=key, number=int(number)))

    def forget(self, key: str) -> None:
        """Its end has been taken note of."""
        self._send(protocol.Forget(key=key))

    # ── the connection ───────────────────────────────────────────────────────────────────────────────────────────────

    async def _open(self) -> SupervisorClient:
        asyncio.get_running_loop().add_reader(self.connection.stream, self._receive)
        try:
            await self._next_state()
        except BaseException:
            self.close()
            raise
        return self

    async def _next_state(self) -> State:
        look: asyncio.Future[State] = asyncio.get_running_loop().create_future()
        self._looks.append(look)
        return await self._answer(look)

    async def _answer(self, answer: asyncio.Future[T]) -> T:
        await asyncio.wait((answer, self._over), return_when=asyncio.FIRST_COMPLETED)
        if not answer.done():
            raise SupervisorGone(self.folder, self._over.result())
        return answer.result()

    def _send(self, *messages: protocol.FromAgent) -> None:
        """Send these, after what waits already."""
        if not self.alive:
            raise SupervisorGone(self.folder, self._over.result())
        loop, stream = asyncio.get_running_loop(), self.connection.stream
        try:
            self.connection.send(*messages)
        except OSError:  # what it sent before it was lost is still to be read, and then the end
            self.connection.unsent.clear()
        if self.connection.unsent:
            loop.add_writer(stream, self._send)
        else:
            loop.remove_writer(stream)

    def _receive(self) -> None:
        messages, more = self.connection.receive()
        for data in messages:
            try:
                self._handle(protocol.from_supervisor(data))
            except Exception:  # those that arrived with it must not be lost
                logger.exception("a supervisor's message was not understood: %r", data)
        if not more:
            code = self.process.poll() if self.process else None
            how = "" if code is None else describe_exit(code)
            self._finish(Gone(phrase("supervisor_dead", pid=self.state.pid, how=how)))

    def _handle(self, message: protocol.FromSupervisor) -> None:
        match message:
            case State(kept=kept):
                earlier = () if self.state.pid else kept
                self.state = message
                while self._looks:
                    self._looks.pop().set_result(message)
                for record in earlier:
                    if record.ended is not None:
                        self._handle(record.ended)
            case Begun(key=key) | NotBegun(key=key):
                if start := self._starts.pop(key, None):
                    start.set_result(message)
            case Ended():
                if self.owner is not None:
                    self.owner.rank_ended(message)
            case protocol.Replaced():
                self._finish(Gone(phrase("supervisor_replaced"), replaced=True))

    def _finish(self, gone: Gone) -> None:
        if not self.alive:
            return
        self._over.set_result(gone)
        loop, stream = asyncio.get_running_loop(), self.connection.stream
        loop.remove_reader(stream)
        loop.remove_writer(stream)
        stream.close()
        # A failure to start is an exception, not news.
        if self.owner is not None and self.state.pid and not self._dismissed:
            self.owner.supervisor_gone(self, gone)
