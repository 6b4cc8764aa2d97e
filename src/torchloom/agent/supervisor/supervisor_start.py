"""Starting a keeper: with which interpreter, flags and environment, and whether it dies with us."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from torchloom.agent.supervisor import framing
from torchloom.agent.supervisor.main import START
from torchloom.errors import BadInput

LOG = "keeper.log"


@dataclass(frozen=True)
class SupervisorOptions:
    """How to start a keeper. Warm ranks need its interpreter, flags and environment to be theirs."""

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

    In this very thread: a tied keeper dies with the thread that started it.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    ours, theirs = framing.pair()
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
        raise BadInput(f"cannot start a keeper with {how.python} in {how.cwd or '.'}: {error.strerror}") from error
    return process, ours
