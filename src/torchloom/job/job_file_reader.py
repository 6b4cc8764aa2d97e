"""job.toml: a job to submit. Its settings have the names of the options of `loom run`.

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

Paths are relative to the folder of the file, as the nodes see it.
"""

from __future__ import annotations

import contextlib
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from torchloom.core.detect.kinds_and_responses import HANGS
from torchloom.errors import BadInput
from torchloom.job.options_from_spec import read_table
from torchloom.job.policy_syntax import EVENTS, rule
from torchloom.job.replicas import as_replicas
from torchloom.protocol.codec import encode
from torchloom.protocol.ids import check_name
from torchloom.protocol.job_spec import JobSettings, Rule, Task
from torchloom.shared.suggestions import did_you_mean
from torchloom.threadlet.process.identity import sanitised

_SWITCHES = ("dry_run", "check")
"""In [policy], beside the events."""

MOST = 10_000
"""Nodes of a job; of ranks on one there are fewer."""
MOST_BYTES = 768 * 1024
"""Of a job as a message. A server of users takes 1 MiB by default, and the weaver adds how attempts ended."""


class JobFile(JobSettings, frozen=True, forbid_unknown_fields=True):
    job: str = ""
    """Name of the job; default: the name of the file."""
    script: str = ""
    """The script to run. A file names either a script or a module."""
    module: str = ""
    """The module to run, as `python -m` does."""
    args: tuple[str, ...] = ()
    """Arguments of the script."""
    cwd: str = "."
    """Folder to run in."""
    nnodes: int | str = 1
    """Nodes; "MIN:MAX": a restart takes what is there, at least MIN."""
    nproc_per_node: int | str = 1
    """Ranks on each node; "MIN:MAX": a restart takes what is there, at least MIN."""
    policy: dict[str, object] = msgspec.field(default_factory=dict)
    """A rule for each kind of incident, as `--on` takes it, and `dry_run`."""
    torchft: dict[str, object] | None = None
    """Makes it a job of replicas under torchft."""


def read(path: Path) -> tuple[str, Task]:
    """The job's name, and what to run; BadInput says what is wrong with the file."""
    return read_job(read_toml(path), f"{path}", path.parent, sanitised(path.stem))


def read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise BadInput(f"{path} cannot be read: {error.strerror}", hint="`loom submit job.toml`") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise BadInput(f"{path} is not TOML: {error}") from error
    except RecursionError:
        raise BadInput(f"{path} is nested too deeply") from None


def read_job(content: Mapping[str, object], source: str, folder: Path, name: str) -> tuple[str, Task]:
    """A job from the content of a file, or of one of its tables. Paths start from `folder`; `name` is the default."""
    with _errors_in(f"{source}: "):
        file = read_table(content, JobFile)
    if bool(file.script) == bool(file.module):
        what = "both script and module" if file.script else "neither script nor module"
        raise BadInput(f"{source} names {what}", hint='script = "train.py"')
    name = check_name("job", file.job or name)
    with _errors_in(f"{source}: "):
        task = _task(file, (folder / file.cwd).absolute())
        with _errors_in("[torchft] "):
            task = task if file.torchft is None else as_replicas(task, file.torchft)
        return name, check_size(task)


@contextlib.contextmanager
def _errors_in(place: str) -> Iterator[None]:
    try:
        yield
    except BadInput as error:
        raise BadInput(f"{place}{error.message}", hint=error.hint) from None


def _rules(policy: dict[str, object]) -> tuple[Rule, ...]:
    rules = []
    for key, text in policy.items():
        if key in _SWITCHES:
            if not isinstance(text, bool):
                raise BadInput(f"[policy] {key} is true or false")
        elif key not in EVENTS:
            raise BadInput(f"[policy] has no event {key!r}", hint=did_you_mean(key, [*EVENTS, *_SWITCHES]))
        elif not isinstance(text, str):
            example = f"stacks+restart@{text}" if key in HANGS and type(text) is int else "report"
            raise BadInput(f"[policy] {key} is a rule, as text", hint=f'{key} = "{example}"')
        else:
            with _errors_in(f"[policy] {key}: "):
                rules.append(rule(key, text))
    return tuple(rules)


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


def _task(file: JobFile, cwd: Path) -> Task:
    least, per_node = span("nproc_per_node", file.nproc_per_node)
    min_nodes, nodes = span("nnodes", file.nnodes)
    return make_task(
        {name: getattr(file, name) for name in JobSettings.__struct_fields__},
        argv=(file.script, *file.args) if file.script else ("-m", file.module, *file.args),
        cwd=str(cwd),
        per_node=per_node,
        least=least,
        nodes=nodes,
        min_nodes=min_nodes,
        dry_run=file.policy.get("dry_run", False),
        policy=_rules(file.policy),
        check=bool(file.policy.get("check", file.check)),
        log_dir=str(cwd / file.log_dir) if file.log_dir else "",
    )


def make_task(settings: Mapping[str, Any], **rest: Any) -> Task:
    """A task of settings and of what is derived from them. All is checked; BadInput says what cannot be."""
    try:
        task = msgspec.convert({**settings, **rest}, Task, from_attributes=True)
    except msgspec.ValidationError as error:
        raise BadInput(str(error).replace("`$.", "`")) from error
    if task.checkpoint_pattern and "{step}" not in task.checkpoint_pattern:
        raise BadInput(f"checkpoint_pattern {task.checkpoint_pattern!r} has no {{step}}", hint="step_{step}.pt")
    return task


def check_size(task: Task) -> Task:
    """The task, if it and its replicas fit into one message, with room for what the weaver adds."""
    replicas = task.torchft.replicas + task.torchft.spares if task.torchft is not None else 1
    size, limit = len(encode(task)), MOST_BYTES // replicas
    if size > limit:
        raise BadInput(
            f"the command of the job, with its environment, is too long: {size:,} bytes, the limit is {limit:,}"
            + (f" for each of {replicas} replicas" if replicas > 1 else ""),
            hint="let the script read long arguments from a file",
        )
    return task
