"""The verb that shows the log: read straight from its stream, so it works while the weaver is down."""

from __future__ import annotations

import sys
from collections import deque
from typing import TYPE_CHECKING

from torchloom.errors import BadInput

if TYPE_CHECKING:
    from nats.aio.client import Client

    from torchloom.cli.call import Call
    from torchloom.cli.verb_registry import Verbs
    from torchloom.views.records import Event, Teller

_WIDEN = 4
"""If too few entries had something to show, this many times more are read."""


def add(verbs: Verbs) -> None:
    verb = verbs.add(
        "events", events, "show what happened, oldest first",
        "Works while the weaver is down. With -o json, one object per line.\n\n  loom events -f --job mnist",
        listing=True,
    )  # fmt: skip
    verb.add_argument("-f", "--follow", action="store_true", help="Follow new events")
    verb.add_job("--job", help="Show only this job")
    verb.add_argument("--last", type=int, default=200, metavar="N", help="Number of past events to show; default: 200")


def events(call: Call) -> int:
    if call.args.last < 0:
        raise BadInput(f"--last {call.args.last} is not a number of events")
    call.wait(_follow(call) if call.args.follow else _show_past(call))
    return 0


async def _show_past(call: Call) -> None:
    from torchloom.bus.connection import connect, find
    from torchloom.protocol.subjects import Role
    from torchloom.views.records import Teller

    client = await connect(find(call.settings, Role.VIEWER), name="loom events")
    try:
        _print(call, (await past(call, client, Teller(call.args.job)))[1])
    finally:
        await client.close()


async def _follow(call: Call) -> None:
    from torchloom.cli.event_follow import follow
    from torchloom.views.records import Teller

    teller = Teller(call.args.job)

    async def before(client: Client) -> int:
        last, found = await past(call, client, teller)
        _print(call, found)
        return last

    def now(seq: int, data: bytes) -> None:
        _print(call, told(call, teller, seq, data))

    await follow(call.settings, before, now, call.note)


async def past(call: Call, client: Client, teller: Teller) -> tuple[int, list[Event]]:
    """The last sequence of the log, and the last N events worth telling."""
    from torchloom.bus.log_reader import extent, read_log
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
    return whole.last, list(events)


def told(call: Call, teller: Teller, seq: int, data: bytes) -> list[Event]:
    import msgspec

    from torchloom.protocol.codec import decode_entry

    try:
        return list(teller.events(seq, decode_entry(data)))
    except msgspec.MsgspecError as error:
        call.note(f"loom: entry {seq} of the log cannot be read: {error}")
        return []


def _print(call: Call, found: list[Event]) -> None:
    from torchloom.views.records import as_object, lines

    for event in found:
        if call.json:
            call.print_json(as_object(event))
        else:
            call.print(lines(event, call.screen))
    sys.stdout.flush()  # a reader at the end of a pipe wants it now
