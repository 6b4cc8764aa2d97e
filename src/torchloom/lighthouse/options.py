"""The options of a lighthouse: the same for `loom lighthouse` and `python -m torchloom.lighthouse`."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, fields
from pathlib import Path

from torchloom.errors import BadInput

DEFAULT_BIND = "127.0.0.1:29510"
"""The port of torchft's own lighthouse, but on the loopback interface only."""


@dataclass(frozen=True)
class Options:
    job: str
    bind: str = DEFAULT_BIND
    min_replicas: int = 1
    join_timeout_ms: int = 60_000
    heartbeat_timeout_ms: int = 5_000
    quorum_tick_ms: int = 100
    folder: Path | None = None
    """None: `lighthouses/JOB` in the state folder."""


NUMBERS = {
    "min_replicas": ("N", "Smallest number of members of a quorum"),
    "join_timeout_ms": ("MS", "Milliseconds for which ready replicas wait for others that are alive"),
    "heartbeat_timeout_ms": (
        "MS", "Milliseconds of silence after which a replica counts as dead; evicted ones at once",
    ),
    "quorum_tick_ms": ("MS", "Milliseconds between two checks without a request"),
}  # fmt: skip
"""The options that are numbers, with their unit and meaning."""


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--job", required=True, metavar="JOB", help="Job whose replicas it serves")
    parser.add_argument(
        "--bind", default=DEFAULT_BIND, metavar="HOST:PORT",
        help=f"Address to listen on; port 0: the last one used, else any free one; default: {DEFAULT_BIND}",
    )  # fmt: skip
    for name, (unit, meaning) in NUMBERS.items():
        default = getattr(Options, name)
        parser.add_argument(
            _option(name), type=int, default=default, metavar=unit, help=f"{meaning}; default: {default}"
        )
    parser.add_argument(
        "--folder", type=Path, metavar="PATH", help="Folder for its quorums; default: in the state folder"
    )


def read_options(args: argparse.Namespace) -> Options:
    from torchloom.protocol.ids import check_name

    check_name("job", args.job)
    for name in NUMBERS:
        least = 0 if name == "join_timeout_ms" else 1
        if getattr(args, name) < least:
            raise BadInput(f"{_option(name)} {getattr(args, name)} is too small", hint=f"at least {least}")
    return Options(**{field.name: getattr(args, field.name) for field in fields(Options)})


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"
