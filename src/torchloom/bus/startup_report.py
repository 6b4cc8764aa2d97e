"""How a process in the background tells the process that started it that it is up, or why it is not."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Callable, Sequence
from typing import IO

import msgspec

from torchloom.errors import TorchLoomError

DESCRIPTOR = "TORCHLOOM_REPORT_FD"
"""The variable that holds the number of the pipe, for one process only."""


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
            pass_fds=(writing,), env=os.environ | {DESCRIPTOR: str(writing)},
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
    descriptor = os.environ.pop(DESCRIPTOR, "")
    if descriptor.isdecimal():
        with contextlib.suppress(OSError), os.fdopen(int(descriptor), "wb") as pipe:
            pipe.write(msgspec.json.encode(report))


def send_error(error: TorchLoomError) -> None:
    send_report(StartupReport(error=error.message, hint=error.hint, exit_code=error.exit_code))


def read_report(pipe: IO[bytes]) -> StartupReport:
    """Waits until it is sent, or the process has ended."""
    try:
        return msgspec.json.decode(pipe.read(), type=StartupReport)
    except msgspec.DecodeError:
        return StartupReport()
