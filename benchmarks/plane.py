"""A control plane of its own for a benchmark, in a temporary folder, gone when the benchmark ends in whatever way."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

from torchloom.bus.nats_server import EmbeddedServer, Listen, end_with_parent, stop_process
from torchloom.bus.state_folder import StateFolder
from torchloom.bus.weaver_client import WeaverClient
from torchloom.errors import TorchLoomError
from torchloom.protocol.subjects import Role
from torchloom.settings import Settings

READY_SECONDS = 30.0
ROOT = Path(__file__).resolve().parent.parent


@contextlib.contextmanager
def server() -> Iterator[tuple[Settings, EmbeddedServer]]:
    """A nats-server with the product's own configuration, and the settings that lead to it."""
    die_tidily()
    _raise_descriptor_limit()
    state = tempfile.mkdtemp(prefix="loom-bench-")
    embedded = EmbeddedServer(StateFolder(Path(state) / "state"), Listen(port=0))
    try:
        embedded.start()
        yield Settings(state=str(embedded.folder.path)), embedded
    finally:
        embedded.stop()
        shutil.rmtree(state, ignore_errors=True)


@contextlib.contextmanager
def plane() -> Iterator[Settings]:
    """The server and `loom weaver` as its own process, as users run it."""
    with server() as (settings, _), weaver(settings):
        yield settings


@contextlib.contextmanager
def weaver(settings: Settings) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-P", "-m", "torchloom.cli.main", "--state", settings.state, "weaver"]
    log = Path(settings.state) / "logs" / "weaver.log"
    with log.open("ab") as output, child(command, environment(settings), stdout=output, stderr=output) as process:
        deadline = time.monotonic() + READY_SECONDS
        while not asyncio.run(_answers(settings)):
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the weaver does not answer:\n{log.read_text(errors='replace')[-2000:]}")
            time.sleep(0.05)
        yield process


async def _answers(settings: Settings) -> bool:
    try:
        async with WeaverClient(settings, Role.VIEWER, timeout=1) as asking:
            await asking.cluster(most=0)
    except TorchLoomError:
        return False
    return True


@contextlib.contextmanager
def child(
    command: list[str], env: dict[str, str], *, stdin: int | None = subprocess.DEVNULL, stdout: object = None,
    stderr: object = None,
) -> Iterator[subprocess.Popen[bytes]]:  # fmt: skip
    """A process that ends with this block, and with this process if that is killed."""
    # A signal between fork and the assignment would leave a process that nobody knows of: it has to wait.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    end = end_with_parent()

    def prepare() -> None:
        end()
        signal.pthread_sigmask(signal.SIG_SETMASK, before)

    try:
        process = subprocess.Popen(
            command, env=env, cwd=ROOT, stdin=stdin, stdout=stdout, stderr=stderr,  # type: ignore[call-overload]
            start_new_session=True, preexec_fn=prepare,  # noqa: PLW1509  no threads that hold locks here
        )  # fmt: skip
    except BaseException:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        raise
    try:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        yield process
    finally:
        stop_process(process, 3)
        kill_group(process.pid)  # a killed rank leaves its loader processes behind for some seconds


def kill_group(pid: int) -> None:
    """Whatever is left of the session that this process led."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def environment(settings: Settings, **more: str) -> dict[str, str]:
    """Ours without any torchLoom variable, which would lead elsewhere, and then the benchmark's."""
    env = {key: value for key, value in os.environ.items() if not key.upper().startswith(("TORCHLOOM_", "MARDUK_"))}
    return env | {"TORCHLOOM_STATE": settings.state} | more


def die_tidily() -> None:
    """SIGTERM unwinds like Ctrl-C does, so that every `finally` runs."""

    def leave(number: int, _frame: FrameType | None) -> None:
        signal.signal(number, signal.SIG_IGN)  # tidying up is not to be interrupted by a second one
        raise SystemExit(128 + number)

    signal.signal(signal.SIGTERM, leave)


def _raise_descriptor_limit() -> None:
    """As far as allowed: ten thousand connections are ten thousand descriptors, and children inherit the limit."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
