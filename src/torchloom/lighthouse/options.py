"""The options of a lighthouse: the same for `loom lighthouse` and `python -m torchloom.lighthouse`."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
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


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--job", required=True, metavar="JOB", help="Job whose replicas it serves")
    parser.add_argument(
        "--bind", default=DEFAULT_BIND, metavar="HOST:PORT",
        help=f"Address to listen on; port 0: the last one used, else any free one; default: {DEFAULT_BIND}",
    )  # fmt: skip
    parser.add_argument(
        "--min-replicas", type=int, default=1, metavar="N", help="Smallest number of members of a quorum; default: 1"
    )
    parser.add_argument(
        "--join-timeout-ms", type=int, default=60_000, metavar="MS",
        help="Milliseconds for which ready replicas wait for others that are alive; default: 60000",
    )  # fmt: skip
    parser.add_argument(
        "--heartbeat-timeout-ms", type=int, default=5_000, metavar="MS",
        help="Milliseconds of silence after which a replica counts as dead; evicted ones at once; default: 5000",
    )  # fmt: skip
    parser.add_argument(
        "--quorum-tick-ms", type=int, default=100, metavar="MS",
        help="Milliseconds between two checks without a request; default: 100",
    )  # fmt: skip
    parser.add_argument(
        "--folder", type=Path, metavar="PATH", help="Folder for its quorums; default: in the state folder"
    )


def read_options(args: argparse.Namespace) -> Options:
    from torchloom.protocol.ids import check_name

    check_name("job", args.job)
    for name in ("min_replicas", "join_timeout_ms", "heartbeat_timeout_ms", "quorum_tick_ms"):
        least = 0 if name == "join_timeout_ms" else 1
        if getattr(args, name) < least:
            option = f"--{name.replace('_', '-')}"
            raise BadInput(f"{option} {getattr(args, name)} is too small", hint=f"at least {least}")
    return Options(
        args.job, args.bind, args.min_replicas, args.join_timeout_ms, args.heartbeat_timeout_ms, args.quorum_tick_ms,
        args.folder,
    )  # fmt: skip
