"""Before an attempt: where its ranks will meet, and what they go on from."""

from __future__ import annotations

import socket
from dataclasses import dataclass, field
from pathlib import Path

from torchloom.checkpoints import search
from torchloom.checkpoints.search import NoValidCheckpoint
from torchloom.errors import BadState, TorchLoomError
from torchloom.messages import Task


@dataclass(frozen=True)
class Prepared:
    port: int = 0
    resume: str = ""
    resume_step: int | None = None
    rejected: dict[str, str] = field(default_factory=dict)
    trouble: str = ""
    """Why there is nothing to start."""
    code: int = 1
    """The exit code that goes with it."""


def prepare(task: Task, host: str) -> Prepared:
    """A free port, and the newest checkpoint that is whole. May take as long as reading a checkpoint does."""
    try:
        if not task.checkpoint_dir:
            return Prepared(free_port(host))
        return _with_checkpoint(task, free_port(host))
    except TorchLoomError as error:
        return Prepared(
            trouble=f"{error.message} → {error.hint}" if error.hint else error.message, code=error.exit_code
        )
    except Exception as error:  # noqa: BLE001  whatever it is, the weaver must hear of it
        return Prepared(trouble=str(error) or type(error).__name__)


def _with_checkpoint(task: Task, port: int) -> Prepared:
    folder = Path(task.cwd, task.checkpoint_dir)
    if not folder.exists():
        return Prepared(port)  # the first start: the script makes it
    if not folder.is_dir():
        raise BadState(f"{folder} is not a folder")
    try:
        found, rejected = search.latest(folder, task.checkpoint_pattern or None)
    except NoValidCheckpoint as none:
        if none.rejected:
            none.hint = "mend or move them away; an empty folder is a new beginning"
            raise
        return Prepared(port)
    told = {name[:255]: why[:2000] for name, why in list(rejected.items())[:100]}
    return Prepared(port, str(found.path), found.step, told)


def free_port(host: str) -> int:
    """One that is free now; a port another program takes meanwhile is found by the rank that binds it."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.bind((host, 0))
        port: int = probe.getsockname()[1]
        return port
