"""job.toml: a job to submit, in the words of `loom run`'s options.

    job = "mnist"                  # default: the name of the file
    script = "train.py"            # or module = "package.train"
    args = ["--epochs", "20"]
    nnodes = 2
    nproc_per_node = 8             # "4:8": a restart takes what is there, at least 4
    checkpoint_dir = "runs/mnist"

    check = true                   # look at the nodes first

    [env]
    NCCL_DEBUG = "WARN"

    [policy]                       # as `--on`; docs/policies.md
    hang = "stacks+restart@30"
    not_finite = "rollback,back=2,skip"
    dry_run = true                 # only say what would be done

    [torchft]                      # replicas that torchft keeps together; nproc_per_node is of each
    replicas = 4                   # default: 2
    min_replicas = 2               # fewer commit no step; default: 1
    spares = 1                     # ready to step in; default: 0
    lighthouse = "loom"            # or "stock", or an address
    heartbeat_timeout = 5          # seconds
    join_timeout = 10

Paths are meant from the folder of the file, as the nodes see it.
"""

from __future__ import annotations

import math
import tomllib
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from torchloom.errors import BadInput
from torchloom.grouped import as_replicas
from torchloom.guess import did_you_mean
from torchloom.messages import Rule, Task, check_name
from torchloom.rules import EVENTS, LASTING, rule
from torchloom.threadlet.names import sanitised

_SWITCHES = ("dry_run", "check")
"""In [policy], beside the events."""

MOST = 10_000
"""Nodes of a job; of ranks on one there are fewer."""


class JobFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    job: str = ""
    script: str = ""
    module: str = ""
    args: list[str] = []
    python: str = ""
    cwd: str = "."
    nnodes: int | str = 1
    nproc_per_node: int | str = 1
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
    check: bool = False
    env: dict[str, str] = {}
    policy: dict[str, object] = {}
    torchft: dict[str, object] | None = None


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
    task = _task(wish, cwd, path)
    if wish.torchft is None:
        return name, task
    try:
        return name, as_replicas(task, wish.torchft)
    except BadInput as error:
        raise BadInput(f"{path}: [torchft] {error.message}", hint=error.hint) from None


def _rules(policy: dict[str, object], path: Path) -> tuple[Rule, ...]:
    found = []
    for key, text in policy.items():
        if key in _SWITCHES:
            if not isinstance(text, bool):
                raise BadInput(f"{path}: [policy] {key} is true or false")
        elif key not in EVENTS:
            hint = did_you_mean(key, [*EVENTS, *_SWITCHES])
            raise BadInput(f"{path}: [policy] has no event {key!r}", hint=hint)
        elif not isinstance(text, str):
            example = f"stacks+restart@{text}" if key in LASTING and type(text) is int else "report"
            raise BadInput(f"{path}: [policy] {key} is a rule, as text", hint=f'{key} = "{example}"')
        else:
            try:
                found.append(rule(key, text))
            except BadInput as error:
                raise BadInput(f"{path}: [policy] {key}: {error.message}", hint=error.hint) from None
    return tuple(found)


def span(what: str, value: int | str) -> tuple[int | None, int]:
    """`4`, or `2:4` as torchrun writes it: the least that will do, if it is another number, and how many."""
    least, colon, most = str(value).partition(":")
    numbers = [least, most] if colon else [least]
    if not all(number.isascii() and number.isdecimal() and 1 <= int(number) <= MOST for number in numbers):
        raise BadInput(f"{what} {value}", hint=f"a number from 1 to {MOST:,}, or two as MIN:MAX")
    if not colon:
        return None, int(least)
    if int(least) > int(most):
        raise BadInput(f"{what} {value}: the least comes first", hint=f"{most}:{least}")
    return (int(least) if int(least) < int(most) else None), int(most)


def _task(wish: JobFile, cwd: Path, path: Path) -> Task:
    try:
        (least, per_node), (min_nodes, nodes) = (
            span(name, getattr(wish, name)) for name in ("nproc_per_node", "nnodes")
        )
    except BadInput as error:
        raise BadInput(f"{path}: {error.message}", hint=error.hint) from None
    task = {
        "argv": [wish.script, *wish.args] if wish.script else ["-m", wish.module, *wish.args],
        "python": wish.python,
        "cwd": str(cwd),
        "env": wish.env,
        "per_node": per_node,
        "least": least,
        "nodes": nodes,
        "min_nodes": min_nodes,
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
        "dry_run": wish.policy.get("dry_run", False),
        "check": wish.policy.get("check", wish.check),
    }
    rules = _rules(wish.policy, path)
    try:
        return replace(msgspec.convert(task, Task), policy=rules)
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
