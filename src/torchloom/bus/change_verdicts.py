"""Verdicts on changes in JetStream: the server stores only the first one for a change."""

from __future__ import annotations

import msgspec
from nats.aio.client import Client

from torchloom.protocol.subjects import COMMIT, VERDICT_STREAM

WRONG_LAST_SEQUENCE = 10071
"""The server's error code for: a verdict is stored already."""


def only_verdict(job: str, change: str) -> dict[str, str]:
    """Headers that let a verdict be stored only if the change has none."""
    return {
        "Nats-Expected-Last-Subject-Sequence": "0",
        "Nats-Expected-Last-Subject-Sequence-Subject": COMMIT.to(job=job, change=change).rpartition(".")[0] + ".*",
    }


async def stands_committed(client: Client, job: str, change: str, timeout: float = 2.0) -> bool:
    """Whether the stored verdict is commit. There must be a verdict."""
    ask = msgspec.json.encode({"last_by_subj": COMMIT.to(job=job, change=change)})
    reply = await client.request(f"$JS.API.DIRECT.GET.{VERDICT_STREAM.name}", ask, timeout=timeout)
    return (reply.headers or {}).get("Status") != "404"
