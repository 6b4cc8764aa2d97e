"""The verb that shows the log: read straight from its stream, so it works while the weaver is down."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterable
from typing import TYPE_CHECKING

from torchloom.cli.verb import Call, Verbs
from torchloom.errors import BadInput

if TYPE_CHECKING:
    from nats.aio.client import Client

    from torchloom.views.records import Event, Teller

_WIDEN = 4
"""If too few entries had something to show, this many times more are read."""


def add(verbs: Verbs) -> None:
    verb = verbs["events"].define(events, "loom events -f --job mnist")
    verb.add_flag("-f", "--follow", help="Follow new events")
    verb.add_job("--job", help="Show only this job")
    verb.add_argument("--last", type=int, default=200, metavar="N", help="Number of past events to show; default: 200")


def events(call: Call) -> int:
    """Works while the weaver is down. With -o json, one object per line."""
    if call.args.last < 0:
        raise BadInput(f"--last {call.args.last} is not a number of events")
    from torchloom.views.records import Teller

    show = _follow if call.args.follow else _show_past
    call.wait(show(call, Teller(call.args.job)))
    return 0


async def _show_past(call: Call, teller: Teller) -> None:
    from torchloom.bus.connection import connect, find
    from torchloom.protocol.subjects import Role

    client = await connect(find(call.settings, Role.VIEWER), name="loom events")
    try:
        await past(call, client, teller)
    finally:
        await client.close()


async def _follow(call: Call, teller: Teller) -> None:
    from torchloom.cli.event_follow import follow

    def show(seq: int, data: bytes) -> None:
        _print(call, told(call, teller, seq, data))

    await follow(call.settings, lambda client: past(call, client, teller), show, call.note)


async def past(call: Call, client: Client, teller: Teller) -> int:
    """Show the last N events worth telling; the last sequence of the log."""
    from torchloom.bus.streams import extent, read_log
    from torchloom.protocol.subjects import LOG_STREAM

    whole = await extent(client, LOG_STREAM.name)
    wanted = span = call.args.last
    events: deque[Event] = deque(maxlen=wanted)
    while wanted:
        first = max(whole.first, whole.last - span + 1)
        events.clear()
        async for stored in read_log(client, LOG_STREAM.name, first, last=whole.last):
            events.extend(told(call, teller, stored.seq, stored.data))
        if len(events) == wanted or first <= whole.first:
            break
        span *= _WIDEN
    _print(call, events)
    return whole.last


def told(call: Call, teller: Teller, seq: int, data: bytes) -> list[Event]:
    import msgspec

    from torchloom.protocol.codec import decode_entry

    try:
        return list(teller.events(seq, decode_entry(data)))
    except msgspec.MsgspecError as error:
        call.note(f"loom: entry {seq} of the log cannot be read: {error}")
        return []


def _print(call: Call, events: Iterable[Event]) -> None:
    from torchloom.views.records import as_object, lines

    for event in events:
        if call.json:
            call.print_json(as_object(event))
        else:
            call.print(lines(event, call.screen))
    sys.stdout.flush()  # a reader at the end of a pipe wants it now
