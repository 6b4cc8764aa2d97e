"""The supervisor: the one process that starts, watches and reaps the ranks of one job on one node.

    python -c START FOLDER [--tied PID] [--preload torch,torch._dynamo] --client FD

Ranks are its children, so it gets their exit status even if the agent dies; and they die with it. It does little, so
that little can make it fail: one thread, one poll, no network. An agent connects to FOLDER/supervisor.sock; a new one
replaces the old one. With --tied the supervisor dies with its parent, the process PID.

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
from torchloom.agent.supervisor.children import ChildProcesses, log
from torchloom.agent.supervisor.fork import die_with, exec_rank
from torchloom.agent.supervisor.warm_start import ColdStart, ParentEnvironment, Target, fit
from torchloom.protocol.phrase import Prose, phrase
from torchloom.shared.files import open_locked


class Reborn(BaseException):
    """Raised in a forked child: it is no supervisor any more, and must unwind and run this."""

    def __init__(self, target: Target) -> None:
        self.target = target


class Supervisor:
    def __init__(self, birth: ParentEnvironment, modules: list[str], lock: int) -> None:
        self.birth = birth
        self.lock = lock
        self.selector = PollSelector()
        """The only place where a supervisor waits. What is registered with a descriptor is called when it is ready."""
        self.wake = os.pipe()
        """Any signal that has a handler writes into it, and so ends the waiting."""
        self.children = ChildProcesses(self.selector, self._send)
        self.listener = protocol.listen_here()
        self.client: protocol.Connection | None = None
        self.to_load = modules
        self.why_cold: Prose = "" if modules else phrase("nothing_preloaded")
        self.waiting: list[protocol.Begin] = []
        """Warm starts that were asked for before everything was loaded."""
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
        self._connect(socket.socket(fileno=client))
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

    def _connect(self, stream: socket.socket) -> None:
        self._send(protocol.Replaced())
        self._disconnect()
        self.client = protocol.Connection(stream)
        self.selector.register(stream, EVENT_READ, self._receive)
        self._send(self._state())

    def _disconnect(self) -> None:
        if self.client:
            self.selector.unregister(self.client.stream)
            self.client.stream.close()
            self.client = None

    def _receive(self) -> None:
        assert self.client
        client, (messages, more) = self.client, self.client.receive()
        for data in messages:
            try:
                self._handle(protocol.from_agent(data))
            except msgspec.MsgspecError as error:
                log(f"not understood: {error}")
        if more:
            self._send()
        elif self.client is client:
            self._disconnect()

    def _send(self, *messages: protocol.FromSupervisor) -> None:
        """Send these, after what waits already. What the agent misses is in State, for the next one."""
        if self.client is None:
            return
        with contextlib.suppress(OSError):
            self.client.send(*messages)
            if len(self.client.unsent) <= protocol.MAX_BYTES:
                events = EVENT_READ | EVENT_WRITE if self.client.unsent else EVENT_READ
                self.selector.modify(self.client.stream, events, self._receive)
                return
        self._disconnect()  # it is gone, or does not read

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
        if self.client:
            self.client.stream.close()
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
        Supervisor(birth, [name for name in options.preload.split(",") if name], lock).serve(options.client)
        return
    except Reborn as reborn:
        target = reborn.target
    warm_start.run(target)  # outside of the except, or every error of the script would be shown as caused by Reborn
