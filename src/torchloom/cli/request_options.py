"""What the verbs that steer have in common: a target, a time limit, and a client that asks until it is answered."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from torchloom.cli import completion_names

if TYPE_CHECKING:
    from argparse import ArgumentParser

    from torchloom.cli.call import Call
    from torchloom.client import AsyncClient


def add_target(verb: ArgumentParser) -> None:
    completion_names.with_names(
        verb.add_argument("target", metavar="TARGET", help="JOB, JOB/REPLICA or JOB/REPLICA/RANK"),
        completion_names.complete_target,
    )


def add_timeout(verb: ArgumentParser) -> None:
    verb.add_argument(
        "--timeout", type=seconds, default=30.0, metavar="S",
        help="Seconds to retry while the weaver does not answer; default: 30",
    )  # fmt: skip


def seconds(text: str) -> float:
    number = float(text)
    if not 0 < number < math.inf:
        raise ValueError(text)
    return number


def client(call: Call) -> AsyncClient:
    """Asks again while nobody answers, and says so once."""
    from torchloom.client import AsyncClient

    timeout = call.args.timeout
    said: list[bool] = []

    def on_wait() -> None:
        if not said:
            said.append(True)
            call.note(f"loom: waiting for the ranks, up to {timeout:g} s")

    return AsyncClient(call.settings, timeout=timeout, on_wait=on_wait)
