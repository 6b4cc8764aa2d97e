"""Asking the agent on a node, past the weaver: whether it is fit, and how fast its network is."""

from __future__ import annotations

import msgspec
import nats.errors
from nats.aio.client import Client

from torchloom.errors import Refused, TorchLoomError, Unreachable
from torchloom.messages import ExchangeView, FitnessView, No, NodeLook, decode_answer, encode
from torchloom.subjects import CHECK


async def ask_node(client: Client, node: str, look: NodeLook, timeout: float) -> FitnessView | ExchangeView:
    """Refused if the agent cannot tell, Unreachable if there is no agent on that node."""
    try:
        reply = await client.request(CHECK.to(node=node), encode(look), timeout=timeout)
        answer: object = decode_answer(reply.data)
    except (nats.errors.Error, OSError) as error:
        raise Unreachable(f"the agent on {node} does not answer", hint="`loom nodes` shows which do") from error
    except msgspec.MsgspecError as error:
        raise TorchLoomError(f"the answer of {node} cannot be understood: {error}") from error
    if isinstance(answer, No):
        raise Refused(answer.why, hint=answer.hint)
    if not isinstance(answer, FitnessView | ExchangeView):
        raise TorchLoomError(f"{node} answered with {type(answer).__name__}, which was not asked for")
    return answer
