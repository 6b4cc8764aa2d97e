"""Encoding and decoding. Decoding validates: a wrong type, an unknown tag or a value out of bounds is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from torchloom.protocol import facts, lighthouse, node, operator, rank, records, views
from torchloom.shared.json_decoding import decoder

encode = msgspec.json.Encoder().encode

decode_report: Callable[[bytes], rank.Report] = decoder(rank.Report)
decode_beat: Callable[[bytes], rank.Beat] = decoder(rank.Beat)
decode_reply: Callable[[bytes], rank.Reply] = decoder(rank.Reply)
decode_fact: Callable[[bytes], facts.Fact] = decoder(facts.Fact)
decode_ask: Callable[[bytes], operator.Ask] = decoder(operator.Ask)
decode_look: Callable[[bytes], views.Look] = decoder(views.Look)
decode_look_lines: Callable[[bytes], views.QueryLines] = decoder(views.QueryLines)
decode_node_look: Callable[[bytes], views.NodeLook] = decoder(views.NodeLook)
decode_command: Callable[[bytes], rank.Command] = decoder(rank.Command)
decode_entry: Callable[[bytes], records.Entry] = decoder(records.Entry)
decode_node_beat: Callable[[bytes], node.NodeBeat] = decoder(node.NodeBeat)
decode_node_command: Callable[[bytes], node.NodeCommand] = decoder(node.NodeCommand)
decode_evict: Callable[[bytes], lighthouse.Evict] = decoder(lighthouse.Evict)
decode_lighthouse_beat: Callable[[bytes], lighthouse.LighthouseBeat] = decoder(lighthouse.LighthouseBeat)
decode_points: Callable[[bytes], views.CurvePoints] = decoder(views.CurvePoints)
decode_answer: Any = decoder(views.Answer)
