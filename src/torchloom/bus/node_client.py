"""A client of the agent on a node, without the weaver: output of its ranks, node checks, network speed."""

from __future__ import annotations

import nats.errors
from nats.aio.client import Client

from torchloom.bus.weaver_client import View, read_answer
from torchloom.errors import Unreachable
from torchloom.protocol.codec import encode
from torchloom.protocol.subjects import CHECK, LINES
from torchloom.protocol.views import NodeLook, QueryLines


async def ask_node(
    client: Client, node: str, look: QueryLines | NodeLook, kind: type[View], timeout: float = 5.0
) -> View:
    """The agent's answer. Raises Refused if the agent has none, Unreachable if there is no agent on that node."""
    subject = LINES if isinstance(look, QueryLines) else CHECK
    try:
        reply = await client.request(subject.to(node=node), encode(look), timeout=timeout)
    except (nats.errors.Error, OSError) as error:
        raise Unreachable(f"the agent on {node} does not answer", hint="`loom nodes` shows which do") from error
    return read_answer(node, reply, kind)
