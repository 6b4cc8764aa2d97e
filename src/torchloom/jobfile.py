"""job.toml: a job to submit, in the words of `loom run`'s options.

    job = "mnist"                  # default: the name of the file
    script = "train.py"            # or module = "package.train"
    args = ["--epochs", "20"]
    nnodes = 2
    nproc_per_node = 8
    checkpoint_dir = "runs/mnist"

    [env]
    NCCL_DEBUG = "WARN"

Paths are meant from the folder of the file, as the nodes see it.
"""

from __future__ import annotations

import math
import tomllib
from pathlib import Path
from typing import Any

import msgspec

from torchloom.errors import BadInput
from torchloom.guess import did_you_mean
from torchloom.messages import Task, check_name
from torchloom.threadlet.names import sanitised


class JobFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    job: str = ""
    script: str = ""
    module: str = ""
    args: list[str] = []
    python: str = ""
    cwd: str = "."
    nnodes: int = 1
    nproc_per_node: int = 1
    node: str | None = None
    max_restarts: int = 3
    restart_window: float = 3600.0
    checkpoint_dir: str = ""
    checkpoint_pattern: str = ""
    resume_arg: str = ""
    standby: bool = True
    preload: list[str] = []
    log_dir: str = ""
    grace: float = 10.0
    env: dict[str, str] = {}


def read(path: Path) -> tuple[str, Task]:
    """The job's name, and what to run; BadInput says what is wrong with the file."""
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise BadInput(f"{path} cannot be read: {error.strerror}", hint="`loom submit job.toml`") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise BadInput(f"{path} is not TOML: {error}") from error
    return parse(content, path)


def parse(content: dict[str, Any], path: Path) -> tuple[str, Task]:
    known = JobFile.__struct_fields__
    for key in content:
        if key not in known:
            raise BadInput(f"{path}: there is no setting {key!r}", hint=did_you_mean(key, list(known)))
    try:
        wish = msgspec.convert(content, JobFile)
    except msgspec.ValidationError as error:
        raise BadInput(f"{path}: {error}") from error
    if bool(wish.script) == bool(wish.module):
        what = "both script and module" if wish.script else "neither script nor module"
        raise BadInput(f"{path} names {what}", hint='script = "train.py"')
    if wish.checkpoint_pattern and "{step}" not in wish.checkpoint_pattern:
        raise BadInput(f"{path}: checkpoint_pattern {wish.checkpoint_pattern!r} has no {{step}}", hint="step_{step}.pt")
    if not math.isfinite(wish.restart_window) or not math.isfinite(wish.grace):
        raise BadInput(f"{path}: restart_window and grace are numbers of seconds")
    cwd = (path.parent / wish.cwd).absolute()
    name = wish.job or sanitised(path.stem)
    check_name("job", name)
    return name, _task(wish, cwd, path)


def _task(wish: JobFile, cwd: Path, path: Path) -> Task:
    task = {
        "argv": [wish.script, *wish.args] if wish.script else ["-m", wish.module, *wish.args],
        "python": wish.python,
        "cwd": str(cwd),
        "env": wish.env,
        "per_node": wish.nproc_per_node,
        "nodes": wish.nnodes,
        "node": wish.node,
        "max_restarts": wish.max_restarts,
        "window_seconds": wish.restart_window,
        "grace_seconds": wish.grace,
        "checkpoint_dir": wish.checkpoint_dir,
        "checkpoint_pattern": wish.checkpoint_pattern,
        "resume_arg": wish.resume_arg,
        "standby": wish.standby,
        "preload": wish.preload,
        "log_dir": str(cwd / wish.log_dir) if wish.log_dir else "",
    }
    try:
        return msgspec.convert(task, Task)
    except msgspec.ValidationError as error:
        raise BadInput(f"{path}: {_in_its_words(str(error))}") from error


def _in_its_words(text: str) -> str:
    """With the names that the file uses."""
    names = {
        "per_node": "nproc_per_node",
        "nodes": "nnodes",
        "window_seconds": "restart_window",
        "grace_seconds": "grace",
    }
    for ours, theirs in names.items():
        text = text.replace(f"$.{ours}", theirs)
    return text.replace("$.", "")
