"""The supervisor: the one process that starts, watches and reaps the ranks of one job on one node.

    python -c START FOLDER [--tied PID] [--preload torch,torch._dynamo] --client FD

Ranks are its children, so it gets their exit status even if the agent dies; and they die with it. It does little, so
that little can make it fail: one thread, one poll, no network. An agent connects to FOLDER/supervisor.sock; a new one
replaces the old one with its first message. With --tied the supervisor dies with its parent, the process PID, which is
its agent: no other one replaces it.

With --preload it imports modules ahead and forks ranks that have them already. In such a child Reborn is raised, the
stack unwinds, and `main` runs the rank's script where a fresh interpreter would have run it.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import socket
import sys
from functools import partial
from pathlib import Path
from selectors import EVENT_READ, EVENT_WRITE, PollSelector
from typing import NoReturn

import msgspec

from torchloom.agent.supervisor import preload, protocol, warm_start
from torchloom.agent.supervisor.child_processes import ChildProcesses, log
from torchloom.agent.supervisor.fork import exec_rank
from torchloom.agent.supervisor.warm_start import ColdStart, ParentEnvironment, Target, fit
from torchloom.protocol.phrase import Prose, phrase
from torchloom.shared.files import open_locked
from torchloom.shared.parent_death import die_with

MOST_SILENT = 8
"""Connections from which nothing has come that is understood. Of more, the oldest is closed."""
MOST_LOGGED = 100
"""Messages that are not understood, which anybody with the rights of this user may send."""


class Reborn(BaseException):
    """Raised in a forked child: it is no supervisor any more, and must unwind and run this."""

    def __init__(self, target: Target) -> None:
        self.target = target


class Supervisor:
    def __init__(self, birth: ParentEnvironment, modules: list[str], lock: int, tied: bool) -> None:
        self.birth = birth
        self.lock = lock
        self.tied = tied
        self.selector = PollSelector()
        """The only place where a supervisor waits. What is registered with a descriptor is called when it is ready."""
        self.wake = os.pipe()
        """Any signal that has a handler writes into it, and so ends the waiting."""
        self.children = ChildProcesses(self.selector, self._send)
        self.listener = protocol.listen_here()
        self.connections: list[protocol.Connection] = []
        self.client: protocol.Connection | None = None
        """The one among them that is the agent's."""
        self.to_load = modules
        self.why_cold: Prose = "" if modules else phrase("nothing_preloaded")
        self.waiting: list[protocol.Begin] = []
        """Warm starts that were asked for before everything was loaded."""
        self.not_understood = 0
        """Messages."""
        self.leaving = False

    def serve(self, client: int) -> None:
        for fd in self.wake:
            os.set_blocking(fd, False)
        signal.set_wakeup_fd(self.wake[1], warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGTERM, lambda *_: setattr(self, "leaving", True))
        for number in (signal.SIGINT, signal.SIGHUP):  # the agent hears Ctrl-C, and decides
            signal.signal(number, signal.SIG_IGN)
        self.selector.register(self.wake[0], EVENT_READ, self._woken)
        self.selector.register(self.listener, EVENT_READ, self._accept)
        self._welcome(self._connect(socket.socket(fileno=client)))
        self._send(self._state())
        while not self.leaving:
            for key, _ in self.selector.select(0 if self.to_load else None):
                # One that came before it may have closed this one, and a new one may have its number.
                if current := self.selector.get_map().get(key.fd):
                    current.data()
            if self.to_load and not self.leaving:
                self._load_next()
        self.children.kill_all()
        Path(protocol.SOCKET).unlink(missing_ok=True)

    def _woken(self) -> None:
        os.read(self.wake[0], 65536)
        self.children.reap()

    def _load_next(self) -> None:
        if trouble := preload.load(self.to_load.pop(0)):
            self.why_cold = trouble
            self.to_load.clear()
        if self.to_load:
            return
        preload.settle()
        self.why_cold = self.why_cold or preload.why_not_fork()
        self._send(self._state())
        while self.waiting:
            self._begin(self.waiting.pop(0))

    # ── talking ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # gone before it was let in
            self._connect(self.listener.accept()[0])

    def _connect(self, stream: socket.socket) -> protocol.Connection:
        """Until it says something that is understood, it disturbs nobody."""
        connection = protocol.Connection(stream)
        self.connections.append(connection)
        self.selector.register(stream, EVENT_READ, partial(self._receive, connection))
        silent = [other for other in self.connections if not other.spoke]
        if len(silent) > MOST_SILENT:
            self._disconnect(silent[0])
        return connection

    def _welcome(self, connection: protocol.Connection) -> None:
        """Make it the agent's. The former agent closes its connection when it has read everything."""
        connection.spoke = True
        if self.tied and self.client is not None:
            self._send_to(connection, protocol.Replaced())
            return
        self._send(protocol.Replaced())
        self.client = connection

    def _disconnect(self, connection: protocol.Connection) -> None:
        self.selector.unregister(connection.stream)
        connection.stream.close()
        self.connections.remove(connection)
        if connection is self.client:
            self.client = None

    def _receive(self, connection: protocol.Connection) -> None:
        messages, more = connection.receive()
        for data in messages:
            try:
                message = protocol.from_agent(data)
            except msgspec.MsgspecError as error:
                self.not_understood += 1
                if self.not_understood <= MOST_LOGGED:
                    log(f"not understood: {str(error)[:1000]}")
                continue
            if not connection.spoke:
                self._welcome(connection)
            if connection is self.client:
                self._handle(message)
        if connection in self.connections:
            if more:
                self._send_to(connection)
            else:
                self._disconnect(connection)

    def _send(self, *messages: protocol.FromSupervisor) -> None:
        """To the agent, if there is one. What it misses is in State, for the next one."""
        if self.client is not None:
            self._send_to(self.client, *messages)

    def _send_to(self, connection: protocol.Connection, *messages: protocol.FromSupervisor) -> None:
        """Send these, after what waits already."""
        with contextlib.suppress(OSError):
            connection.send(*messages)
            if len(connection.unsent) <= protocol.MAX_BYTES:
                events = EVENT_READ | EVENT_WRITE if connection.unsent else EVENT_READ
                self.selector.modify(connection.stream, events, partial(self._receive, connection))
                return
        self._disconnect(connection)  # it is gone, or does not read

    def _handle(self, message: protocol.FromAgent) -> None:
        match message:
            case protocol.Begin() if message.warm and self.to_load:
                self.waiting.append(message)
            case protocol.Begin():
                self._begin(message)
            case protocol.Signal():
                self.children.signal(message)
            case protocol.Forget(key=key):
                self.children.forget(key)
            case protocol.Look():
                self._send(self._state())
            case protocol.Leave():
                self.leaving = True

    def _state(self) -> protocol.State:
        return protocol.State(
            pid=os.getpid(),
            kept=tuple(self.children.records.values()),
            preloading=bool(self.to_load),
            why_cold=self.why_cold,
            memory_mb=preload.memory_mb(),
        )

    # ── starting ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def _begin(self, begin: protocol.Begin) -> None:
        try:
            if not begin.warm:
                raise ColdStart("")
            if why := self.why_cold or preload.why_threads():
                raise ColdStart(why)
            target = fit(begin, self.birth)
        except ColdStart as cold:
            self.children.begin(begin, partial(exec_rank, begin), cold.why)
        else:
            self.children.begin(begin, partial(self._reborn, begin, target), None)

    def _reborn(self, begin: protocol.Begin, target: Target, complaint: int) -> NoReturn:
        """In the child. Nothing of the supervisor's may stay open: the agent would not see the supervisor's end."""
        self.children.close_in_child()
        self.listener.close()
        for connection in self.connections:
            connection.stream.close()
        for fd in (*self.wake, self.lock):
            os.close(fd)
        warm_start.prepare(begin, target, self.birth)
        os.close(complaint)
        raise Reborn(target)


def main() -> None:
    birth = ParentEnvironment.of_this_process()
    parser = argparse.ArgumentParser(prog="torchloom.agent.supervisor.main")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tied", type=int, metavar="PID", help="die with this process, the parent")
    parser.add_argument("--preload", default="", metavar="MODULE,MODULE")
    parser.add_argument("--client", type=int, metavar="FD", required=True, help="the socket of its first agent")
    options = parser.parse_args()
    os.set_inheritable(options.client, False)
    if options.tied is not None:
        die_with(options.tied, signal.SIGTERM)  # there is time to take along what ranks have started
    options.folder.chmod(0o700)  # a process that reaches the socket can run anything as this user
    os.chdir(options.folder)  # so that the socket's path is short, and no file system is held that may be unmounted
    lock = open_locked(Path("supervisor.lock"), record_lock=True)  # which a fork does not inherit
    if lock is None:
        print(f"another supervisor has {options.folder}", file=sys.stderr)
        sys.exit(protocol.ALREADY)
    try:
        modules = [name for name in options.preload.split(",") if name]
        Supervisor(birth, modules, lock, options.tied is not None).serve(options.client)
        return
    except Reborn as reborn:
        target = reborn.target
    warm_start.run(target)  # outside of the except, or every error of the script would be shown as caused by Reborn
