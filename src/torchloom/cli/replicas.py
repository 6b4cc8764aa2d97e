"""Options of a job whose replicas torchft keeps together."""

from __future__ import annotations

import argparse
import os
from typing import TYPE_CHECKING

from torchloom.errors import BadInput

if TYPE_CHECKING:
    from torchloom.messages import Task

ANSWER_SECONDS = 2.0
OPTIONS = ("replicas", "min_replicas", "spares", "lighthouse")


def add_replicas(verb: argparse.ArgumentParser) -> None:
    verb.add_argument(
        "--torchft", action="store_true",
        help="the script uses torchft: start replicas of it, each restarted by itself while the others train on",
    )  # fmt: skip
    verb.add_argument("--replicas", type=int, metavar="N", help="with --torchft; default: 2")
    verb.add_argument("--min-replicas", type=int, metavar="N", help="fewer commit no step; default: 1")
    verb.add_argument("--spares", type=int, metavar="N", help="further replicas, for a Manager with spares; default: 0")
    verb.add_argument(
        "--lighthouse", metavar="WHICH",
        help="loom (default): ours; stock: torchft's own; or the address of one that runs already: http://host:29510",
    )  # fmt: skip


def with_replicas(task: Task, args: argparse.Namespace, gpus: int) -> Task:
    """What the options say about replicas."""
    from torchloom.grouped import as_replicas

    given = {name: value for name in OPTIONS if (value := getattr(args, name)) is not None}
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
