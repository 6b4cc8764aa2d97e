"""Forking a rank: how its process is set up, and how a failed start is reported.

The child leads its own session, so that one signal reaches it and its loaders. It dies with the supervisor. Its output
goes to files, which do not depend on a reader. Until the rank runs, a pipe is open that exec closes: what is written
into it is a complaint, and its end without one means that the rank runs.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NoReturn

import msgspec

from torchloom.agent.supervisor.protocol import Begin
from torchloom.protocol.phrase import Prose, phrase
from torchloom.shared.json_decoding import decoder
from torchloom.shared.parent_death import die_with

STARTUP = str(Path(__file__).parent / "startup")
TEXT = 2000
"""Characters of a complaint: what a message has room for."""
FAILED = 127
"""Exit code of a child that could not become a rank, as a shell has it for a command that is not found."""
_decode_complaint: Callable[[bytes], Prose] = decoder(Prose)


class StartFailed(Exception):
    def __init__(self, why: Prose) -> None:
        self.why = why


def fork_rank(begin: Begin, become: Callable[[int], NoReturn]) -> tuple[int, int]:
    """Fork; the child goes into `become`, in place already, with the pipe to complain into, and signals blocked.

    Returns its process id, and where `read_complaint` learns whether it could start.
    """
    supervisor = os.getpid()
    out = _open_output(begin.stdout)
    try:
        err = _open_output(begin.stderr)
    except StartFailed:
        os.close(out)
        raise
    reading, writing = os.pipe()
    os.set_blocking(reading, False)
    # A signal that comes while the child still has the supervisor's handlers must not be taken for the supervisor's.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    pid, failure = -1, ""
    try:
        pid = os.fork()
    except OSError as error:
        failure = error.strerror or str(error)
    if pid == 0:  # outside of the try: nothing below may happen in the child
        _in_child(begin, supervisor, (out, err, reading), writing, become)
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
    for fd in (out, err, writing):
        os.close(fd)
    if failure:
        os.close(reading)
        raise StartFailed(phrase("cannot_fork", error=failure))
    return pid, reading


def exec_rank(begin: Begin, complaint: int) -> NoReturn:
    """A fresh interpreter: nothing of the supervisor is left but the process number."""
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        with contextlib.suppress(OSError, ValueError):  # libc keeps some for itself
            signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    for fd in _open_fds():
        if fd > 2 and fd != complaint:
            with contextlib.suppress(OSError):
                os.close(fd)
    try:
        os.execvpe(begin.argv[0], begin.argv, with_startup(begin.env))
    except OSError as error:
        raise StartFailed(phrase("cannot_run", program=begin.argv[0], error=error.strerror)) from None


def with_startup(env: Mapping[str, str]) -> dict[str, str]:
    """The environment in which a fresh interpreter of a rank runs startup/sitecustomize.py before its script."""
    if "TORCHLOOM_LAUNCHER" not in env:
        return dict(env)
    given = env.get("PYTHONPATH")
    return {**env, "PYTHONPATH": f"{STARTUP}{os.pathsep}{given}" if given else STARTUP}


def read_complaint(pipe: int) -> Prose | None:
    """Why a rank could not start; empty if it runs; None if that is not yet known."""
    try:
        data = os.read(pipe, 65536)
    except BlockingIOError:
        return None
    try:
        return _decode_complaint(data) if data else ""
    except msgspec.MsgspecError:  # cut off: what there is of it
        return data.decode(errors="replace")[:TEXT]


def _in_child(
    begin: Begin, supervisor: int, spare: tuple[int, ...], complaint: int, become: Callable[[int], NoReturn]
) -> NoReturn:
    try:
        os.setsid()
        die_with(supervisor)
        out, err = spare[:2]
        null = os.open(os.devnull, os.O_RDONLY)
        for source, target in ((null, 0), (out, 1), (err, 2)):
            os.dup2(source, target)
        for fd in (null, *spare):
            os.close(fd)
        try:
            os.chdir(begin.cwd)
        except OSError as error:
            raise StartFailed(phrase("cannot_enter", folder=begin.cwd, error=error.strerror)) from None
        become(complaint)
    except Exception as error:  # noqa: BLE001  a child that is not yet a rank must not become a second supervisor
        os.write(complaint, encode_complaint(error))
        os._exit(FAILED)


def encode_complaint(error: Exception) -> bytes:
    """Why a rank could not start, for `read_complaint`."""
    why = error.why if isinstance(error, StartFailed) else (str(error) or repr(error))[:TEXT]
    try:
        return msgspec.json.encode(why)
    except UnicodeEncodeError:  # a path need not be valid text
        return msgspec.json.encode(ascii(why)[:TEXT])


def _open_output(path: str) -> int:
    if not path.startswith("/"):
        raise StartFailed(phrase("output_not_absolute", path=path))
    how = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOCTTY
    try:
        fd = os.open(path, how | os.O_NONBLOCK, 0o600)  # a pipe that nobody reads must not stop the supervisor
    except OSError as error:
        raise StartFailed(phrase("cannot_write_to", path=path, error=error.strerror)) from None
    os.set_blocking(fd, True)
    return fd


def _open_fds() -> list[int]:
    """Closing all numbers up to the limit can take minutes: some containers have a limit of a billion."""
    for listing in ("/proc/self/fd", "/dev/fd"):
        with contextlib.suppress(OSError):
            return [int(name) for name in os.listdir(listing)]  # noqa: PTH208
    return list(range(3, os.sysconf("SC_OPEN_MAX")))
