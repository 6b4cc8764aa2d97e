"""Reading what ranks printed, wherever they run: from the agent on their node."""

from __future__ import annotations

import msgspec
import nats.errors
from nats.aio.client import Client

from torchloom.errors import Refused, TorchLoomError, Unreachable
from torchloom.messages import LinesView, LookLines, No, decode_answer, encode
from torchloom.subjects import LINES


async def read_lines(client: Client, node: str, look: LookLines, timeout: float = 5.0) -> LinesView:
    """One part. Refused if the agent has no such thing, Unreachable if there is no agent on that node."""
    try:
        reply = await client.request(LINES.to(node=node), encode(look), timeout=timeout)
        answer: object = decode_answer(reply.data)
    except (nats.errors.Error, OSError) as error:
        raise Unreachable(f"the agent on {node} does not answer", hint="`loom nodes` shows which do") from error
    except msgspec.MsgspecError as error:
        raise TorchLoomError(f"the answer of {node} cannot be understood: {error}") from error
    if isinstance(answer, No):
        raise Refused(answer.why, hint=answer.hint)
    if not isinstance(answer, LinesView):
        raise TorchLoomError(f"{node} answered with {type(answer).__name__}, which was not asked for")
    return answer
