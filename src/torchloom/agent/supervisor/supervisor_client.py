"""The agent's end of the connection with a supervisor: start or find one, start ranks, learn how they end.

    how = SupervisorOptions(tied=True)
    link = await SupervisorClient.start(folder, how=how, ended=inbox.put_nowait, gone=inbox.put_nowait)
    answer = await link.begin(Begin(key="job:replica:0:1", argv=(sys.executable, "train.py"), ...))

`ended` is called for every rank that ends, and on `find` for those that ended earlier and were not forgotten: so a key
may be heard of twice, by two links. `gone` is called once if the keeper dies or talks to another agent; never after
`close`. Both are called from the event loop.
"""

from __future__ import annotations

import asyncio
import socket
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from torchloom.agent.monitor.exit_evidence import last_lines, signal_name
from torchloom.agent.supervisor import framing
from torchloom.agent.supervisor.main import ALREADY
from torchloom.agent.supervisor.packet_socket import PacketSocket
from torchloom.agent.supervisor.protocol import (
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
    from_keeper,
)
from torchloom.agent.supervisor.protocol import check as check_word
from torchloom.agent.supervisor.supervisor_start import LOG, SupervisorOptions, spawn
from torchloom.errors import AlreadyUp, BadInput, TorchLoomError, Unreachable

__all__ = ["Gone", "SupervisorClient", "SupervisorGone", "SupervisorOptions"]


@dataclass(frozen=True)
class Gone:
    """The keeper is dead, and so are its ranks; or it is alive and now talks to someone else."""

    why: str
    keys: tuple[str, ...]
    """The ranks that were running, as far as this link knew."""
    replaced: bool = False


class SupervisorGone(TorchLoomError):
    """What was asked of a keeper that died meanwhile. A rank that was being started is dead too."""


@dataclass(eq=False)
class SupervisorClient:
    folder: Path
    connection: socket.socket
    ended: Callable[[Ended], None]
    gone: Callable[[Gone], None]
    process: subprocess.Popen[bytes] | None = None
    """The keeper, if it was started here."""
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
        """Start a keeper in this folder and wait for its first word. It goes on preloading after that."""
        folder = folder.absolute()
        process, ours = spawn(folder, how)
        link = cls(folder, ours, ended, gone, process, how.tied)
        try:
            return await link._open()
        except SupervisorGone:
            code = await asyncio.to_thread(process.wait)
            if code == ALREADY:
                raise AlreadyUp(f"another keeper has {folder}") from None
            last = " ".join(last_lines(folder / LOG, 1))
            raise TorchLoomError(f"the keeper did not start (exit code {code}): {last}") from None
        except BaseException:  # not wanted any more: nobody would know of it
            process.kill()
            process.wait()
            raise

    @classmethod
    async def find(cls, folder: Path, ended: Callable[[Ended], None], gone: Callable[[Gone], None]) -> SupervisorClient:
        """Talk to the keeper that stands in this folder; an agent it talks to now is replaced. Unreachable if none."""
        folder = folder.absolute()
        try:
            connection = framing.connect(folder)
        except OSError as error:
            raise Unreachable(f"no keeper in {folder}: {error.strerror}") from error
        return await cls(folder, connection, ended, gone)._open()

    async def close(self) -> None:
        """Stop talking. A standing keeper stays, and so do its ranks; a tied one is asked to end."""
        if self.tied and not self._over:
            await self.dismiss()
            return
        self._finish(Gone("closed", ()), tell=False)

    async def dismiss(self) -> None:
        """Ask the keeper to kill all ranks and to end; returns when it has."""
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
        """Returns when the rank runs, or could not be started. While preloading goes on, a warm one waits for it."""
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
            self._finish(Gone("closed", ()), tell=False)
            raise
        self.gone = told
        return self

    def _say(self, word: FromAgent) -> None:
        if self._over:
            raise SupervisorGone(f"the keeper in {self.folder} is gone: {self._over.why}")
        self._line.say(encode(word))

    def _hear(self, data: bytes) -> None:
        match from_keeper(data):
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
                self._finish(Gone("another agent talks to the keeper now", tuple(self.running), True), tell=True)

    def _answer(self, answer: Begun | NotBegun) -> None:
        start = self._starts.pop(answer.key, None)
        if start and not start.done():
            start.set_result(answer)

    def _obituary(self) -> Gone:
        why = f"the keeper (process {self.state.pid}) is dead"
        if self.process and (code := self.process.poll()) is not None:
            why += f": killed by {signal_name(-code)}" if code < 0 else f": exit code {code}"
        return Gone(why, tuple(self.running))

    def _finish(self, gone: Gone, tell: bool) -> None:
        if self._over:
            return
        self._over = gone
        self._line.close()
        error = SupervisorGone(f"the keeper in {self.folder} is gone: {gone.why}")
        everyone: list[asyncio.Future[Any]] = [*self._starts.values(), *self._looks]
        for waiting in everyone:
            if not waiting.done():
                waiting.set_exception(error)
        self._starts.clear()
        self._looks.clear()
        if tell:
            self.gone(gone)
