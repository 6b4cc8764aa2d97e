"""`loom up` and `loom down`: one process that starts nats-server and the weaver, and restarts them.

It holds the lock of the state folder, and restarts either child when it ends, after a pause that grows while the child
keeps ending. If this process is killed, its children end with it, and the next `loom up` can start.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import math
import os
import queue
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import msgspec

from torchloom.bus.connection import connect, find
from torchloom.bus.nats_server import EmbeddedServer, Listen, end_with_parent, stop_process
from torchloom.bus.state_folder import StateFolder
from torchloom.bus.weaver_client import ask_for_plane
from torchloom.errors import AlreadyUp, BadState, TorchLoomError, Unreachable
from torchloom.protocol.subjects import Role
from torchloom.protocol.views import PlaneView
from torchloom.settings import Settings
from torchloom.shared.addresses import is_loopback, split_url
from torchloom.shared.files import open_locked
from torchloom.shared.json_decoding import decoder

Say = Callable[[str], None]
DEFAULT_PORT = 4222
READY_SECONDS = 30.0
DOWN_SECONDS = 15.0
STOP_SECONDS = 5.0
LONGEST_PAUSE = 5.0
GOOD_SECONDS = 30.0
"""After this long a child has started successfully: its next exit counts as the first one."""
LOOK_SECONDS = 3.0
"""Seconds between two questions to the weaver about its state."""
ROOM_BYTES = 1024 * 1024
LOG_BYTES = 10 * 1024 * 1024
REPORT_DESCRIPTOR = "TORCHLOOM_REPORT_FD"
"""The variable that holds the number of the pipe for the startup report, for one process only."""


@dataclass(frozen=True)
class ListenRequest:
    """Where to listen, as the command line says it."""

    host: str | None = None
    """None: the last one, else loopback."""
    port: int | None = None
    """None: the last one, else 4222. 0: any free one."""
    cert: Path | None = None
    key: Path | None = None


def up(settings: Settings, listen: ListenRequest, say: Say, detach: bool = False) -> int:
    """Run the control plane until SIGINT or SIGTERM; with `detach`, in the background."""
    logging.getLogger("asyncio").setLevel(logging.ERROR)  # it warns at every TLS connection that nats-py closes
    folder = StateFolder(settings.state_folder)
    folder.make()
    if detach:
        return _detach(settings, listen, folder, say)
    with _locked(folder):
        ControlPlane(settings, folder, _listen(folder, listen), say).run()
    return 0


def down(settings: Settings, say: Say) -> int:
    """Stop the control plane of this state folder. Training continues without it."""
    folder = StateFolder(settings.state_folder)
    pid = holder(folder)
    if pid is None:
        say(f"nothing is up in {folder.path}")
        return 0
    os.kill(pid, signal.SIGTERM)
    deadline = time.monotonic() + DOWN_SECONDS
    while holder(folder) == pid:
        if time.monotonic() > deadline:
            raise TorchLoomError(
                f"process {pid} did not end within {DOWN_SECONDS:.0f} s", hint=f"look at {folder.logs / 'up.log'}"
            )
        time.sleep(0.02)
    say("down")
    return 0


def holder(folder: StateFolder) -> int | None:
    """The process that runs the control plane of this folder, or None."""
    try:
        with folder.lock.open("r") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        text = folder.lock.read_text().strip()
        return int(text) if text.isdigit() else None
    except OSError:
        return None
    return None


@contextlib.contextmanager
def _locked(folder: StateFolder) -> Iterator[None]:
    lock = open_locked(folder.lock)
    if lock is None:
        endpoint = folder.read_endpoint()
        where = f" at {endpoint.url}" if endpoint else ""
        raise AlreadyUp(
            f"the control plane is up already{where} (process {holder(folder) or '?'}, {folder.path})",
            hint="`loom status` shows it; `loom down` ends it",
        )
    try:
        os.ftruncate(lock, 0)
        os.write(lock, f"{os.getpid()}\n".encode())
        yield
    finally:
        os.close(lock)


def _listen(folder: StateFolder, request: ListenRequest) -> Listen:
    endpoint = folder.read_endpoint()
    if endpoint is not None and not folder.authority.exists():
        raise BadState(
            f"{folder.path} has joined the control plane at {endpoint.url}",
            hint="choose another folder with --state; or remove this one to leave that control plane",
        )
    port, host = request.port, request.host
    if port is None:
        port = split_url(endpoint.url)[1] if endpoint else DEFAULT_PORT
    if host is None:
        host = endpoint.listen if endpoint and endpoint.listen else "127.0.0.1"
    cert, key = request.cert, request.key
    if not is_loopback(host) and not (cert or key):
        from torchloom.bus.tls import ensure_tls

        cert, key = ensure_tls(folder, host)
    return Listen(host, port, cert, key)


@dataclass
class Child:
    """One of the two processes, and its restarts."""

    name: str
    start: Callable[[], subprocess.Popen[bytes]]
    process: subprocess.Popen[bytes] | None = None
    started: float = 0.0
    failures: int = 0
    due: float = 0.0
    """When to restart it, if it is not running."""

    def begin(self) -> subprocess.Popen[bytes]:
        self.started = time.monotonic()
        self.process = self.start()
        return self.process


class ControlPlane:
    def __init__(self, settings: Settings, folder: StateFolder, listen: Listen, say: Say) -> None:
        self.settings = settings
        self.folder = folder
        self.say = say
        self.weaver = Child("weaver", self._start_weaver)
        self.server = None if settings.addr else Child("nats-server", EmbeddedServer(folder, listen).start)
        self.children = [self.weaver] if self.server is None else [self.server, self.weaver]
        self.stopping = False
        self._signals = queue.SimpleQueue[int]()  # one that a signal handler may put into
        self._look_due = 0.0
        self._log_trouble = ""
        """Why the log could not be written when the weaver was last asked."""
        self._weaver_report: IO[bytes] | None = None

    def run(self) -> None:
        """Start both processes, then watch them. The caller holds the lock of the folder."""
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD):
            signal.signal(number, self._on_signal)
        try:
            self._begin()
            while not self.stopping:
                with contextlib.suppress(queue.Empty):
                    self._signals.get(timeout=0.5)
                self._restart_ended()
                self._restart_stuck()
        finally:
            for child in reversed(self.children):
                if child.process is not None:
                    stop_process(child.process, STOP_SECONDS)
        self.say("down")

    def _on_signal(self, number: int, _frame: object) -> None:
        self.stopping = self.stopping or number != signal.SIGCHLD
        self._signals.put(number)

    def _begin(self) -> None:
        for child in self.children:
            child.begin()
        address = find(self.settings, Role.VIEWER)
        plane = self._wait_for_weaver()
        alerts = ""
        if plane is not None and (plane.ingress or plane.ingress_trouble):
            alerts = f", alerts at {plane.ingress}" if plane.ingress else f", {plane.ingress_trouble}"
        text = f"up at {address}{alerts}, state in {self.folder.path}"
        self.say(text)
        send_report(StartupReport(ready=text))

    def _wait_for_weaver(self) -> PlaneView | None:
        deadline = time.monotonic() + READY_SECONDS
        while time.monotonic() < deadline and not self.stopping:
            process = self.weaver.process
            if process is not None and process.poll() is not None:
                assert self._weaver_report is not None
                report = read_report(self._weaver_report)
                raise BadState(
                    f"the weaver ended at once: {report.error or _how_it_ended(process.returncode)}",
                    hint=report.hint or f"details are in {self.folder.logs / 'weaver.log'}",
                )
            plane = asyncio.run(look_at_weaver(self.settings))
            if plane is not None:
                return plane
            time.sleep(0.02)
        if not self.stopping:
            raise BadState(f"the weaver did not answer within {READY_SECONDS:.0f} s")
        return None

    def _restart_ended(self) -> None:
        """Restart children that have ended, after a pause that grows while they keep ending."""
        now = time.monotonic()
        for child in self.children:
            if child.process is not None and child.process.poll() is not None:
                how = _how_it_ended(child.process.returncode)
                child.failures = 0 if now - child.started > GOOD_SECONDS else child.failures + 1
                pause = _pause(child.failures - 1) if child.failures else 0.0
                child.process, child.due = None, now + pause
                self.say(f"{child.name} {how}; starting it again" + (f" in {pause:.1f} s" if pause else ""))
            if child.process is None and not self.stopping and now >= child.due:
                try:
                    self.say(f"{child.name} is running again (pid {child.begin().pid})")
                except TorchLoomError as error:
                    child.failures += 1
                    child.due = now + _pause(child.failures)
                    self.say(f"{child.name} does not start: {error.message}")

    def _restart_stuck(self) -> None:
        """Restart what runs but does not work: a weaver that decides nothing, and a server that writes nothing.

        After a write error the server refuses every further write until it is restarted, even if there is room again.
        """
        now = time.monotonic()
        if now < self._look_due:
            return
        self._look_due = now + LOOK_SECONDS
        plane = asyncio.run(look_at_weaver(self.settings))
        if plane is not None and "stuck" in plane.troubles and self.weaver.process is not None:
            self.say(f"{plane.trouble}; the weaver is restarted")
            self.weaver.process.kill()
            return
        trouble = plane.trouble if plane is not None and "log" in plane.troubles else ""
        server = self.server.process if self.server is not None else None  # not another party's server
        lasting = trouble and self._log_trouble
        if lasting and server is not None and shutil.disk_usage(self.folder.path).free > ROOM_BYTES:
            self.say(f"{trouble}; there is room on the disk, so nats-server is restarted")
            stop_process(server, STOP_SECONDS)
            trouble = ""
        self._log_trouble = trouble

    def _start_weaver(self) -> subprocess.Popen[bytes]:
        if self._weaver_report is not None:
            self._weaver_report.close()
        with _open_log(self.folder.logs / "weaver.log") as output:
            process, self._weaver_report = start_reporting(_loom(self.settings, "weaver"), output, end_with_parent())
        return process


def _pause(failures: int) -> float:
    return min(LONGEST_PAUSE, math.ldexp(0.1, failures))


async def look_at_weaver(settings: Settings) -> PlaneView | None:
    """The state of the weaver that these settings lead to, or None if there is none."""
    try:
        client = await connect(find(settings, Role.VIEWER), name="loom up", timeout=1)
    except Unreachable:
        return None
    try:
        return await ask_for_plane(client, timeout=1)
    finally:
        await client.close()


def _loom(settings: Settings, *words: str) -> list[str]:
    # -P: the current folder is no place to import from.
    return [sys.executable, "-P", "-m", "torchloom.cli.main", "--state", str(settings.state_folder), *words]


def _detach(settings: Settings, listen: ListenRequest, folder: StateFolder, say: Say) -> int:
    with _locked(folder):
        pass  # raises AlreadyUp
    words = ["up"]
    options = {"--listen": listen.host, "--port": listen.port, "--tls-cert": listen.cert, "--tls-key": listen.key}
    for option, value in options.items():
        if value is not None:
            words += [option, str(value)]
    log = folder.logs / "up.log"
    with _open_log(log) as output:
        process, pipe = start_reporting(_loom(settings, *words), output)
    with pipe:
        if not select.select([pipe], [], [], READY_SECONDS + STOP_SECONDS)[0]:
            stop_process(process, STOP_SECONDS)
            raise BadState(f"the control plane did not come up within {READY_SECONDS:.0f} s", hint=f"look at {log}")
        report = read_report(pipe)
    if report.ready:
        say(f"{report.ready} (process {process.pid})")
        return 0
    code = process.wait()  # it reports an error just before it ends
    error = TorchLoomError(report.error or f"`loom up` {_how_it_ended(code)}", hint=report.hint or f"look at {log}")
    error.exit_code = report.exit_code or 1
    raise error


def _open_log(path: Path) -> IO[bytes]:
    """A log file to append to; a large one is put aside first."""
    if path.exists() and path.stat().st_size > LOG_BYTES:
        path.replace(path.with_suffix(".log.1"))
    return path.open("ab")


def _how_it_ended(code: int) -> str:
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"


# ── how a process in the background tells the process that started it that it is up, or why it is not ──


class StartupReport(msgspec.Struct, frozen=True, kw_only=True):
    """Empty if the process ended without one."""

    ready: str = ""
    """For people: where it is reached."""
    error: str = ""
    hint: str = ""
    exit_code: int = 0


def start_reporting(
    command: Sequence[str], output: IO[bytes], preexec_fn: Callable[[], None] | None = None
) -> tuple[subprocess.Popen[bytes], IO[bytes]]:
    """Start a process with a session of its own; and the pipe that `read_report` reads."""
    reading, writing = os.pipe()
    try:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output,
            pass_fds=(writing,), env=os.environ | {REPORT_DESCRIPTOR: str(writing)},
            start_new_session=True, preexec_fn=preexec_fn,  # noqa: PLW1509  no threads here
        )  # fmt: skip
    except BaseException:
        os.close(reading)
        raise
    finally:
        os.close(writing)
    return process, os.fdopen(reading, "rb")


def send_report(report: StartupReport) -> None:
    """To the process that started this one, if that waits for a report; the first one only."""
    descriptor = os.environ.pop(REPORT_DESCRIPTOR, "")
    if descriptor.isdecimal():
        with contextlib.suppress(OSError), os.fdopen(int(descriptor), "wb") as pipe:
            pipe.write(msgspec.json.encode(report))


def send_error(error: TorchLoomError) -> None:
    send_report(StartupReport(error=error.message, hint=error.hint, exit_code=error.exit_code))


def read_report(pipe: IO[bytes]) -> StartupReport:
    """Waits until it is sent, or the process has ended."""
    try:
        return decoder(StartupReport)(pipe.read())
    except msgspec.DecodeError:
        return StartupReport()
