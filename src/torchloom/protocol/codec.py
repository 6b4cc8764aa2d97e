"""Encoding and decoding. Decoding validates: a wrong type, an unknown tag or a value out of bounds is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from torchloom.protocol.facts import Fact
from torchloom.protocol.lighthouse import Evict, LighthouseBeat
from torchloom.protocol.node import NodeBeat, NodeCommand
from torchloom.protocol.operator import Ask
from torchloom.protocol.rank import Beat, Command, Reply, Report
from torchloom.protocol.records import Entry
from torchloom.protocol.views import Answer, CurvePoints, Look, NodeLook, QueryLines


def _decoder(kind: Any) -> Callable[[bytes], Any]:
    """Decode or refuse. JSON nested thousands deep would otherwise be the interpreter's error, not the sender's."""
    decode = msgspec.json.Decoder(kind).decode

    def checked(data: bytes) -> Any:
        try:
            return decode(data)
        except RecursionError:
            raise msgspec.DecodeError("nested too deeply") from None

    return checked


encode = msgspec.json.Encoder().encode

decode_report: Callable[[bytes], Report] = _decoder(Report)
decode_beat: Callable[[bytes], Beat] = _decoder(Beat)
decode_reply: Callable[[bytes], Reply] = _decoder(Reply)
decode_fact: Callable[[bytes], Fact] = _decoder(Fact)
decode_ask: Callable[[bytes], Ask] = _decoder(Ask)
decode_look: Callable[[bytes], Look] = _decoder(Look)
decode_look_lines: Callable[[bytes], QueryLines] = _decoder(QueryLines)
decode_node_look: Callable[[bytes], NodeLook] = _decoder(NodeLook)
decode_command: Callable[[bytes], Command] = _decoder(Command)
decode_entry: Callable[[bytes], Entry] = _decoder(Entry)
decode_node_beat: Callable[[bytes], NodeBeat] = _decoder(NodeBeat)
decode_node_command: Callable[[bytes], NodeCommand] = _decoder(NodeCommand)
decode_evict: Callable[[bytes], Evict] = _decoder(Evict)
decode_lighthouse_beat: Callable[[bytes], LighthouseBeat] = _decoder(LighthouseBeat)
decode_points: Callable[[bytes], CurvePoints] = _decoder(CurvePoints)
decode_answer: Any = _decoder(Answer)
