"""The result of `decide`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from itertools import chain
from typing import Any, NamedTuple

from torchloom.core.state.cluster import ClusterState
from torchloom.core.state.pending_operations import Volatile
from torchloom.protocol.ids import RankId
from torchloom.protocol.lighthouse import Evict
from torchloom.protocol.node import NodeCommand
from torchloom.protocol.operator import Done, No
from torchloom.protocol.phrase import Prose
from torchloom.protocol.rank import Command
from torchloom.protocol.records import Abort, Record


class WantedVerdict(NamedTuple):
    """A verdict to be stored, unless there is one already; the stored one comes back as an event."""

    job: str
    change: str
    commit: bool
    abort: Abort | None = None
    """Why the change is not to be made, if it is not."""
    key: str = ""
    """The key under which it is stored."""


@dataclass(frozen=True, slots=True)
class Decision:
    records: tuple[Record | Volatile, ...] = ()
    """Folding them changes the cluster state."""
    commands: tuple[tuple[RankId, Command], ...] = ()
    """For ranks, sent once the records are stored."""
    answer: Done | No | None = None
    """For the operator who asked, sent once the records are stored."""
    replies: tuple[tuple[str, Done | No], ...] = ()
    """For operators who asked earlier and still wait, by reply subject."""
    verdicts: tuple[WantedVerdict, ...] = ()
    tasks: tuple[tuple[str, NodeCommand], ...] = ()
    """For the agents on these nodes, once the records are stored."""
    evictions: tuple[tuple[str, Evict], ...] = ()
    """For the lighthouses of these jobs, once the records are stored."""

    @property
    def stored(self) -> tuple[Record, ...]:
        """The records for the log, which stores all of them or none."""
        return tuple(record for record in self.records if not isinstance(record, Volatile))

    def __bool__(self) -> bool:
        return self != NOTHING


NOTHING = Decision()

Handlers = Mapping[type, Callable[[ClusterState, Any, str, float], Decision]]
"""By the type of a request: the function that decides on it, given the state, the request, where it is answered, and
the time. Each module that decides on requests has such a table, and `decide` joins them."""


def merge_decisions(decisions: Iterable[Decision]) -> Decision:
    """Several decisions as one, without answers: they belong to one request."""
    parts = [decision for decision in decisions if decision]
    if not parts:
        return NOTHING
    names = [field.name for field in fields(Decision) if field.name != "answer"]
    merged: dict[str, Any] = {name: tuple(chain.from_iterable(getattr(part, name) for part in parts)) for name in names}
    return Decision(**merged)


def refuse(why: Prose, hint: Prose = "") -> Decision:
    """Answer a request with an error."""
    return Decision(answer=No(why=why, hint=hint))
