"""Options of `loom run` and `loom submit` about responses to incidents and about replicas of torchft."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from torchloom.cli import completion_names
from torchloom.errors import BadInput

if TYPE_CHECKING:
    from argparse import Namespace

    from torchloom.cli.verb_registry import Parser
    from torchloom.protocol.job import Task

ANSWER_SECONDS = 2.0


def add_rules(verb: Parser) -> None:
    verb.add_argument(
        "--on", action="append", default=[], metavar="RULE",
        help="Respond to a kind of incident: hang=stacks+restart@30, not_finite=rollback,back=2,skip,limit=3; may "
        "be repeated; `loom policy` lists the kinds, docs/policies.md explains",
        complete=completion_names.complete_rule,
    )  # fmt: skip
    verb.add_argument("--dry-run-policy", action="store_true", help="Only report what the policy would do")


def with_rules(task: Task, args: Namespace) -> Task:
    """The task with what these options say; a rule takes the place of one for the same event."""
    from msgspec.structs import replace

    from torchloom.job.policy_syntax import rules

    own = {rule.on: rule for rule in (*task.policy, *rules(args.on))}
    return replace(
        task,
        policy=tuple(own.values()),
        dry_run=task.dry_run or args.dry_run_policy,
        check=task.check or bool(args.check),
    )


def add_replicas(verb: Parser) -> None:
    from torchloom.job.option_fields import add_options
    from torchloom.protocol.job import Torchft

    verb.add_argument(
        "--torchft",
        action="store_true",
        help="Start replicas of a script that uses torchft; each restarts alone while the others train",
    )
    add_options(verb, Torchft)


def with_replicas(task: Task, args: Namespace, gpus: int) -> Task:
    """What the options say about replicas."""
    from torchloom.job.option_fields import option_fields
    from torchloom.job.replicas import as_replicas
    from torchloom.protocol.job import Torchft

    given = {field.name: value for field in option_fields(Torchft) if (value := getattr(args, field.name)) is not None}
    if args.torchft:
        return as_replicas(task, given, gpus, os.environ)
    if given:
        option = f"--{next(iter(given)).replace('_', '-')}"
        raise BadInput(f"{option} is for jobs under torchft", hint="add --torchft")
    return task


def silent_lighthouse(task: Task) -> str:
    """The address of the user's own lighthouse, if nobody answers there: replicas would wait without a message."""
    import socket
    from urllib.parse import urlsplit

    where = urlsplit(task.torchft.lighthouse) if task.torchft is not None else urlsplit("")
    if where.hostname is None or where.port is None:
        return ""
    try:
        socket.create_connection((where.hostname, where.port), ANSWER_SECONDS).close()
    except OSError:
        return f"{where.hostname}:{where.port}"
    return ""
