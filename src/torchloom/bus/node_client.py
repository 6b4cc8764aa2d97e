"""A client of the agent on a node, without the weaver: output of its ranks, node checks, network speed."""

from __future__ import annotations

from typing import TypeVar

import msgspec
import nats.errors
from nats.aio.client import Client

from torchloom.errors import Refused, TorchLoomError, Unreachable
from torchloom.protocol.codec import decode_answer, encode
from torchloom.protocol.operator import No
from torchloom.protocol.queries import NodeLook, QueryLines
from torchloom.protocol.subjects import CHECK, LINES

View = TypeVar("View")


async def ask_node(
    client: Client, node: str, look: QueryLines | NodeLook, kind: type[View], timeout: float = 5.0
) -> View:
    """The agent's answer. Raises Refused if the agent has none, Unreachable if there is no agent on that node."""
    subject = LINES if isinstance(look, QueryLines) else CHECK
    try:
        reply = await client.request(subject.to(node=node), encode(look), timeout=timeout)
        answer: object = decode_answer(reply.data)
    except (nats.errors.Error, OSError) as error:
        raise Unreachable(f"the agent on {node} does not answer", hint="`loom nodes` shows which do") from error
    except msgspec.MsgspecError as error:
        raise TorchLoomError(f"the answer of {node} cannot be understood: {error}") from error
    if isinstance(answer, No):
        raise Refused(str(answer.why), hint=str(answer.hint), code=answer.code)
    if not isinstance(answer, kind):
        raise TorchLoomError(f"{node} answered with {type(answer).__name__}, which was not asked for")
    return answer
