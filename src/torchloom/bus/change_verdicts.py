"""Verdicts on changes in JetStream: the server stores only the first one for a change."""

from __future__ import annotations

import msgspec
from nats.aio.client import Client
from nats.js.errors import APIError

from torchloom.protocol.subjects import ABORT, COMMIT, VERDICT_STREAM

WRONG_LAST_SEQUENCE = 10071
"""The server's error code for: a verdict is stored already."""


async def write_verdict(client: Client, job: str, change: str, commit: bool, timeout: float = 2.0) -> bool:
    """Write a verdict on a change unless one is stored; returns whether the stored one is commit."""
    committed = COMMIT.to(job=job, change=change)
    headers = {
        "Nats-Expected-Last-Subject-Sequence": "0",
        "Nats-Expected-Last-Subject-Sequence-Subject": committed.rpartition(".")[0] + ".*",
    }
    subject = committed if commit else ABORT.to(job=job, change=change)
    try:
        await client.jetstream().publish(subject, b"", timeout, VERDICT_STREAM.name, headers)
    except APIError as error:
        if error.err_code != WRONG_LAST_SEQUENCE:
            raise
        question = msgspec.json.encode({"last_by_subj": committed})
        reply = await client.request(f"$JS.API.DIRECT.GET.{VERDICT_STREAM.name}", question, timeout=timeout)
        return (reply.headers or {}).get("Status") != "404"
    return commit
