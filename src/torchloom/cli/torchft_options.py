"""Options of a job whose replicas torchft keeps together."""

from __future__ import annotations

import argparse
import os
from typing import TYPE_CHECKING

from torchloom.errors import BadInput

if TYPE_CHECKING:
    from torchloom.protocol.job import Task

ANSWER_SECONDS = 2.0


def add_replicas(verb: argparse.ArgumentParser) -> None:
    from torchloom.job.option_fields import add_options
    from torchloom.protocol.job import Torchft

    verb.add_argument(
        "--torchft",
        action="store_true",
        help="Start replicas of a script that uses torchft; each restarts alone while the others train",
    )
    add_options(verb, Torchft)


def with_replicas(task: Task, args: argparse.Namespace, gpus: int) -> Task:
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
    """The address of the user's own lighthouse, if nobody answers there: replicas would wait without a word."""
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
