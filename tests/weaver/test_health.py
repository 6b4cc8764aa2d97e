"""Nobody's clock counts but the weaver's own, and that one does not jump: clocks that are wrong decide nothing."""

from __future__ import annotations

import inspect
import time
from collections.abc import Iterator
from typing import Any, get_args, get_type_hints

import msgspec

from torchloom.protocol.facts import Fact
from torchloom.protocol.node import NodeBeat
from torchloom.protocol.rank import Beat, Reply, Report
from torchloom.weaver.health import Clock

MOMENTS = frozenset({"at", "now", "time", "when", "began", "ended", "since", "opened", "heard", "until", "stamp"})
"""How a field is called that holds a moment rather than a duration."""


def fields(kind: Any, seen: tuple[Any, ...] = ()) -> Iterator[str]:
    """Of a message and of what it holds. A phrase may hold phrases."""
    if kind in seen:
        return
    seen = (*seen, kind)
    if inspect.isclass(kind) and issubclass(kind, msgspec.Struct):
        for name, of in get_type_hints(kind, include_extras=True).items():
            yield f"{kind.__name__}.{name}"
            yield from fields(of, seen)
    for part in get_args(kind):
        yield from fields(part, seen)


def test_no_rank_and_no_agent_tells_the_time() -> None:
    said = {name for kind in (Beat, NodeBeat, Report, Reply, Fact) for name in fields(kind)}
    assert {"Beat.idle_seconds", "RankStatus.frozen", "StepTimes.longest", "Hello.pid"} <= said  # they say how long
    told = {name for name in said if name.rpartition(".")[2] in MOMENTS}
    # Which time an alert fires: compared with what the same monitoring system said before, and with nothing else.
    assert told == {"DeviceFailed.began", "DeviceRecovered.began"}


def test_the_weavers_clock_begins_with_the_wall_and_goes_on_without_it() -> None:
    before = time.time()
    clock = Clock()
    assert before - 1e-3 <= clock() <= time.time() + 1e-3
    began, first = time.monotonic(), clock()
    last, ended = clock(), time.monotonic()
    assert 0 <= last - first <= ended - began + 1e-6
    assert "time.time" not in inspect.getsource(Clock.__call__)
