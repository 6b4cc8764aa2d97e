"""The verb that shows the log: read straight from its stream, so it works while the weaver is down."""

from __future__ import annotations

from torchloom.cli.verb_call import Call, Verbs
from torchloom.errors import BadInput


def add(verbs: Verbs) -> None:
    verb = verbs["events"].define(events, "loom events -f --job mnist")
    verb.add_flag("-f", "--follow", help="Follow new events")
    verb.add_job("--job", help="Show only this job")
    verb.add_argument("--last", type=int, default=200, metavar="N", help="Number of past events to show; default: 200")


def events(call: Call) -> int:
    """Works while the weaver is down. With -o json, one object per line."""
    if call.args.last < 0:
        raise BadInput(f"--last {call.args.last} is not a number of events")
    from torchloom.cli.event_reader import EventReader

    reader = EventReader(call)
    call.wait(reader.follow() if call.args.follow else reader.show_past())
    return 0
