"""What the log holds, as data: a test of what happened compares codes of phrases, and not the sentences of a view.

A test of what people see renders the phrase that it expects. `make test-noise` changes `render` in all processes alike.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import msgspec

from torchloom.bus.connection import connect, find
from torchloom.bus.streams import read_log
from torchloom.protocol.codec import decode_entry
from torchloom.protocol.phrase import Phrase, Prose, phrase
from torchloom.protocol.records import IncidentAmended, IncidentOpened, Record
from torchloom.protocol.subjects import LOG_STREAM, Role
from torchloom.settings import Settings
from torchloom.views.wording.phrases import render

KILLED = ("killed_by", {"signal": "SIGKILL"})
BY_SIGKILL = phrase("killed_by", signal="SIGKILL")
PLACES = frozenset({"ranks_wait_in", "ranks_are_in"})
"""Phrases that say where ranks are, by spans of their numbers."""


def rank_failed(rank: int, how: Phrase, error: Prose = "") -> str:
    """As people read, in this process and in those that a test starts, that a rank of a run failed."""
    return render(phrase("rank_of_run_failed", rank=rank, how=how, error=error))


async def read_records(settings: Settings) -> list[Record]:
    """All of them, oldest first."""
    client = await connect(find(settings, Role.VIEWER), name="test", timeout=20)
    try:
        entries = [decode_entry(stored.data) async for stored in read_log(client, LOG_STREAM.name, 1)]
        return [record for entry in entries for record in entry.records]
    finally:
        await client.close()


def phrases(*values: object) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each phrase in records or other messages, and each within another: its code and its arguments."""
    for value in values:
        yield from _phrases(msgspec.to_builtins(value))


def _phrases(value: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    if isinstance(value, dict):
        if isinstance(value.get("code"), str):
            yield value["code"], value.get("args", {})
        value = value.values()
    elif isinstance(value, str) or not isinstance(value, Iterable):
        return
    for item in value:
        yield from _phrases(item)


def codes(*values: object) -> set[str]:
    return {code for code, _ in phrases(*values)}


def of_incident(records: Iterable[Record], id: str) -> list[IncidentOpened | IncidentAmended]:
    """What was recorded of one incident: how it was opened, and what came after that."""
    return [r for r in records if isinstance(r, IncidentOpened | IncidentAmended) and r.id == id]


def ranks_with_stacks(records: Iterable[Record], id: str) -> set[int]:
    """The ranks of which an incident shows where they were."""
    shown = [record for record in of_incident(records, id) if isinstance(record, IncidentAmended)]
    named = phrases(*(record for record in shown if record.stacks is not None))
    spans = [span for code, args in named if code in PLACES for span in args["ranks"] if isinstance(span, list | tuple)]
    return {rank for first, last in spans for rank in range(first, last + 1)}
