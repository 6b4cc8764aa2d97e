"""Encoding and decoding. Decoding validates: a wrong type, an unknown tag or a value out of bounds is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from torchloom.protocol import facts, lighthouse, node, operator, rank, records, views


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

decode_report: Callable[[bytes], rank.Report] = _decoder(rank.Report)
decode_beat: Callable[[bytes], rank.Beat] = _decoder(rank.Beat)
decode_reply: Callable[[bytes], rank.Reply] = _decoder(rank.Reply)
decode_fact: Callable[[bytes], facts.Fact] = _decoder(facts.Fact)
decode_ask: Callable[[bytes], operator.Ask] = _decoder(operator.Ask)
decode_look: Callable[[bytes], views.Look] = _decoder(views.Look)
decode_look_lines: Callable[[bytes], views.QueryLines] = _decoder(views.QueryLines)
decode_node_look: Callable[[bytes], views.NodeLook] = _decoder(views.NodeLook)
decode_command: Callable[[bytes], rank.Command] = _decoder(rank.Command)
decode_entry: Callable[[bytes], records.Entry] = _decoder(records.Entry)
decode_node_beat: Callable[[bytes], node.NodeBeat] = _decoder(node.NodeBeat)
decode_node_command: Callable[[bytes], node.NodeCommand] = _decoder(node.NodeCommand)
decode_evict: Callable[[bytes], lighthouse.Evict] = _decoder(lighthouse.Evict)
decode_lighthouse_beat: Callable[[bytes], lighthouse.LighthouseBeat] = _decoder(lighthouse.LighthouseBeat)
decode_points: Callable[[bytes], views.CurvePoints] = _decoder(views.CurvePoints)
decode_answer: Any = _decoder(views.Answer)
