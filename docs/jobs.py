"""The page on job files: every setting of a job, as the code declares it."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterable, Iterator
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

import msgspec

from docs.markdown import code, fenced, table
from torchloom.job.job_file_reader import JobFile
from torchloom.protocol.job_spec import JobSettings, Option, Torchft

WORDS = {str: "text", int: "whole number", float: "number", bool: "true or false", tuple: "list", dict: "table"}
EXAMPLE = """\
job = "mnist"
script = "train.py"
args = ["--epochs", "20"]
nnodes = 2
nproc_per_node = "6:8"
checkpoint_dir = "runs/mnist"

[env]
NCCL_DEBUG = "WARN"

[policy]
hang = "stacks+restart@60"
"""
REPLICAS = """\
script = "train_ddp.py"

[torchft]
replicas = 4
min_replicas = 2
"""


def job_file() -> list[str]:
    only_file = [name for name in JobFile.__struct_fields__ if name not in JobSettings.__struct_fields__]
    return [
        "# Job files",
        "",
        "`loom submit job.toml` starts the job that a file describes as soon as there is room for all its ranks. Paths "
        "are relative to the folder of the file. The script, the interpreter and the checkpoints must be found under "
        "the same paths on every node; nothing is copied.",
        "",
        *fenced("toml", EXAMPLE.splitlines()),
        "",
        "## What to run",
        "",
        *_table(JobFile, only_file),
        "",
        "[Policies](policies.md#writing-rules) explains the rules of `[policy]`.",
        "",
        "## Settings",
        "",
        "Those with an option can be given to `loom run` too.",
        "",
        *_table(JobSettings, JobSettings.__struct_fields__),
        "",
        "## Replicas under torchft",
        "",
        "A table `[torchft]`, which may be empty, makes it a job of replicas under [torchft](torchft.md). Each replica "
        "has `nproc_per_node` ranks, on any node that has room for them.",
        "",
        *fenced("toml", REPLICAS.splitlines()),
        "",
        *_table(Torchft, Torchft.__struct_fields__),
    ]


def _table(settings: type[msgspec.Struct], names: Iterable[str]) -> list[str]:
    fields = {field.name: field for field in msgspec.structs.fields(settings)}
    hints = get_type_hints(settings, include_extras=True)
    docs = dict(_docstrings(settings))
    rows = []
    for name in names:
        option = next((mark for mark in get_args(hints[name]) if isinstance(mark, Option)), None)
        flag = f"--{name.replace('_', '-')}" if option is not None else ""
        meaning = " ".join(filter(None, [f"{option.help}." if option is not None else "", docs.get(name, "")]))
        rows.append((code(name), code(flag), _values(hints[name]), code(_default(fields[name].default)), meaning))
    head = ["setting", "option", "values", "default", "meaning"]
    if not any(row[1] for row in rows):
        return table(head[:1] + head[2:], (row[:1] + row[2:] for row in rows))
    return table(head, rows)


def _values(hint: Any) -> str:
    """The type in the words of TOML, and the bounds where there are any."""
    kind, *marks = get_args(hint) if hasattr(hint, "__metadata__") else (hint,)
    union = get_origin(kind) in {Union, UnionType}
    kinds = [part for part in get_args(kind) if part is not type(None)] if union else [kind]
    text = " or ".join(WORDS[get_origin(_plain(part)) or _plain(part)] for part in kinds)
    for meta in (mark for mark in marks if isinstance(mark, msgspec.Meta)):
        least = f"from {meta.ge:,}" if meta.ge is not None else f"above {meta.gt:,}" if meta.gt is not None else ""
        most = f"to {meta.le:,}" if meta.le is not None else ""
        text = " ".join(filter(None, [text, least, most]))
    return text


def _plain(hint: Any) -> Any:
    """A type without what is annotated on it."""
    return get_args(hint)[0] if hasattr(hint, "__metadata__") else hint


def _default(default: object) -> str:
    if default is msgspec.NODEFAULT or default is None or default in {"", ()}:
        return ""
    return str(default).lower() if isinstance(default, bool) else f"{default}"


def _docstrings(settings: type[msgspec.Struct]) -> Iterator[tuple[str, str]]:
    """The texts that stand under the fields of a class."""
    body = ast.parse(textwrap.dedent(inspect.getsource(settings))).body[0]
    assert isinstance(body, ast.ClassDef)
    for field, text in zip(body.body, body.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
            yield ast.unparse(field.target), str(text.value.value)
